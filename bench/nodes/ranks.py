"""Ranks of a module on this machine, started by torchrun in this process."""

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def start(count: int, module: str, argv: list[str]) -> int:
    """Runs so many ranks of a module until they end. A signal is passed on to them.

    Returns the exit code: of the first rank that failed, or 128 + the signal's number.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A rank says itself why it failed; torchrun adds lines about its end, and that of the others.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    words = ["--standalone", "--nproc-per-node", str(count), "-m", module, *argv]
    try:
        torchrun.run(torchrun.parse_args(words))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        print(f"{module}: rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        end_children()
        return 128 + error.sigval
    return 0


def end_children() -> None:
    """Kills what a signal has left: torchrun forgets ranks that it was just starting."""
    for file in Path("/proc/self/task").glob("*/children"):
        for number in file.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
