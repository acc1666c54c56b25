"""Ranks of a module on this machine, started by torchrun in this process."""

import os

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def start(count: int, module: str, argv: list[str]) -> int:
    """Runs so many ranks of a module until they end. A signal is passed on to them.

    Returns the exit code: of the first rank that failed, or 128 + the signal's number.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    words = ["--standalone", "--nproc-per-node", str(count), "-m", module, *argv]
    try:
        torchrun.run(torchrun.parse_args(words))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + error.sigval
    return 0
