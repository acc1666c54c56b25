"""In each Python process of a command that `bench watch` runs: where its main thread is.

The watcher puts this folder first on PYTHONPATH, so Python imports this file at its start. A thread
writes the place to a file once a second. A process whose C code holds the GIL cannot do that; it
writes its stack when the watcher sends SIGNAL, which faulthandler needs no GIL for.
"""

import atexit
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

FOLDER = "BENCH_WATCH"  # the variable that names the folder of the files
SIGNAL = signal.SIGRTMAX - 9  # of no launcher and no library that we know
ASK = "ask"  # the file that asks for the flight recorder
BEAT = 1.0  # seconds from one file to the next
RANKS = {  # the variables of torchrun, horovodrun, mpirun and srun
    "RANK": "WORLD_SIZE",
    "HOROVOD_RANK": "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",
}


def rank() -> tuple[int, int] | None:
    """This process's rank and the world size, as far as they are known by now."""
    group = sys.modules.get("torch.distributed")
    if getattr(group, "is_initialized", bool)():
        return group.get_rank(), group.get_world_size()
    if "torch.distributed.elastic.multiprocessing.api" in sys.modules:
        return None  # torchrun itself, whose variables may be srun's
    for name, size in RANKS.items():
        if name in os.environ and size in os.environ:
            return int(os.environ[name]), int(os.environ[size])
    return None


def counted() -> int | None:
    """How often memory of a GPU was asked for: it grows with each step, and a waiting rank's not.

    None without a GPU. (A rank that waits for its GPU keeps a core busy.)
    """
    cuda = sys.modules.get("torch.cuda")
    if not getattr(cuda, "is_initialized", bool)():
        return None
    return cuda.memory_stats().get("allocation.all.allocated", 0)


def last_collective() -> str | None:
    """The newest entry of PyTorch's flight recorder, NCCL's or Gloo's, where it has any."""
    core, entries = getattr(sys.modules.get("torch._C"), "_distributed_c10d", None), []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(core, name, None)
        entries = entries or (json.loads(dump()).get("entries") if dump else [])
    if not entries:
        return None
    last = max(entries, key=lambda entry: entry["record_id"])
    number = last["p2p_seq_id"] if last["is_p2p"] else last["collective_seq_id"]
    return f"{last['profiling_name']} {last['input_sizes']}, number {number}"


def write(state: dict) -> None:
    path = Path(os.environ[FOLDER], f"{os.getpid()}.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps(state))
    part.replace(path)


class Beats(threading.Thread):
    """Writes a file in each beat: the rank, the stack, and since when they have been the same."""

    def __init__(self):
        super().__init__(name="bench-watch", daemon=True)
        self.main, self.pid, self.at = threading.main_thread().ident, os.getpid(), None
        self.state = {"began": time.monotonic()}

    def run(self) -> None:
        while True:
            with suppress(Exception):  # the command must not notice
                self.beat()
            time.sleep(BEAT)

    def beat(self) -> None:
        frames = [*traceback.walk_stack(sys._current_frames()[self.main])]
        now, count = time.monotonic(), counted()
        at = [frame.f_lasti for frame, _ in frames], rank(), count
        if at != self.at:
            stack = [[f.f_code.co_filename, n, f.f_code.co_qualname] for f, n in frames[:80]]
            self.at = at
            self.state |= {"rank": at[1], "since": now, "gpu": count is not None}
            self.state |= {"stack": stack, "last": None}
        elif self.state["last"] is None and Path(os.environ[FOLDER], ASK).exists():
            self.state["last"] = last_collective() or ""  # it asks the GPU: only of a likely hang
        write(self.state | {"beat": now})


def ended() -> None:
    """Python ends: by itself, or by an exception."""
    if os.getpid() != BEATS.pid:
        return  # a fork that has no file of its own
    with suppress(Exception):
        error = getattr(sys, "last_value", None)
        text = f"{type(error).__name__}: {error}"[:200] if error else "its program ended"
        write(BEATS.state | {"rank": rank() or BEATS.state.get("rank"), "ended": text})


def start() -> None:
    """In this process, or in one that it has forked."""
    global BEATS
    stacks = open(Path(os.environ[FOLDER], f"{os.getpid()}.stack"), "w")
    faulthandler.register(SIGNAL, stacks)
    BEATS = Beats()
    BEATS.start()


def forked() -> None:
    """A fork of a rank is a loader's worker, or another helper of it."""
    with suppress(Exception):
        if rank() is None:
            start()


def next_one() -> None:
    """Runs the sitecustomize.py that this one hides."""
    here = Path(__file__).parent
    others = [path for path in sys.path if Path(path or ".").resolve() != here]
    if spec := PathFinder.find_spec("sitecustomize", others):
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":  # the watcher itself imports it by another name
    with suppress(OSError, KeyError):  # the watcher has ended, or its variable was dropped
        start()
        atexit.register(ended)
        os.register_at_fork(after_in_child=forked)
    next_one()
