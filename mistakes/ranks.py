"""Ranks that are forked from a process that has imported torch, which takes seconds each time."""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

from bench.host import free_port
from bench.process import Finished, environment

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed", "torchvision.transforms.v2", __name__])


def run(size: int, words: list, limit: float, folder: Path) -> Finished:
    """`python WORDS` in a folder, as ranks with the variables that torchrun sets; rank 0's end.

    limit: seconds for all of them. It leaves no process behind.
    """
    env = environment(1, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    env |= {"TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": str(size)}
    env |= {"WORLD_SIZE": str(size)}
    envs = [env | {"RANK": str(number), "LOCAL_RANK": str(number)} for number in range(size)]
    words, end = [str(word) for word in words], time.monotonic() + limit
    ranks = [CONTEXT.Process(target=rank, args=(words, each, folder)) for each in envs]
    try:
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(max(0.0, end - time.monotonic()))
        late = any(each.is_alive() for each in ranks)
    finally:
        for each in (each for each in ranks if each.pid):
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)  # with a loader's workers
            each.kill()  # it may have no group of its own yet
            each.join()
    files = [folder / name for name in ("out.0", "err.0")]
    texts = [file.read_text(errors="replace") if file.exists() else "" for file in files]
    return Finished(ranks[0].exitcode, *texts, late)


def rank(words: list[str], env: dict[str, str], folder: Path) -> None:
    """Runs in the forked process."""
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}.{env['RANK']}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    # As in a new Python: the temporary folder, how it starts processes, its warnings, its words.
    tempfile.tempdir = None
    multiprocessing.set_start_method(None, force=True)
    warnings.resetwarnings()
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
