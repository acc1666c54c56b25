"""What tests share: scripts run as processes, which are always ended, and small data."""

import atexit
import fcntl
import json
import multiprocessing
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

import pytest
from PIL import Image

from bench import ROOT, ladder
from bench.data import write_images as write_idx  # noqa: F401
from bench.host import free_port
from bench.process import Finished, environment, run

LADDER = [Path(script.path).stem for script in ladder.LADDER]
TECHNIQUES = [Path(script.path).stem for script in ladder.TECHNIQUES]
SCRIPTS = [*ladder.SCRIPTS]  # paths
GATED = [group for group in ladder.GROUPS if group not in ("ancestors", "parts")]  # of techniques
ORACLE = "bench/oracle.py"
PROBE = "bench/run/probe.py"  # starts a script, and records what the script itself does not
RECORDED = {
    "--log-json",
    "--max-steps",
    "--images",
    "--exact",
    "--double",
    "--patient",
}  # its flags
WITHOUT_PROBE = {"imagenet.py", "oracle.py"}  # these have such flags of their own
ONEFLOW = ROOT / ".cache" / "oneflow"  # where --install puts OneFlow's environment
SHARED = ROOT.parent / "shared"  # real images, where they are there; never a part of the project
INSTALL = False  # whether tests may change this machine: conftest.py's --install, and CI=true
STRICT = "error:::__main__,error:::__mp_main__"  # warnings that a script itself causes are errors
# How the variables of a launcher begin, which a script must not find by chance:
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "HOROVOD_", "OMPI_", "PMI_")


def full(*cases) -> list:
    """Cases of a parametrized test that only --full runs."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.full)
        for case in cases
    ]


def words(script: str | Path, *flags) -> list[str]:
    """What Python is to run: the script with its flags, by the probe if one of them is its flag.

    A script that spawns its processes gets a port of its own.
    """
    found = [str(word) for word in (script, *flags)]
    name = Path(script).name
    if name == "mnmc_ddp_mp.py" and "--master-port" not in found:
        found += ["--master-port", str(free_port())]
    recorded = name not in WITHOUT_PROBE and PROBE not in found and RECORDED.intersection(found)
    return [PROBE, *found] if recorded else found


def python(script: str | Path, *flags, limit: float = 300, threads: int = 1, **env) -> Finished:
    """A script in one process (mnmc_ddp_mp.py starts its own)."""
    return run([sys.executable, *words(script, *flags)], limit, environment(threads, **env))


def torchrun(nproc: int, script: str | Path, *flags, limit: float = 300, **env) -> Finished:
    """A script under torchrun on this machine, one thread per process."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", nproc, *words(script, *flags)]
    return run(command, limit, environment(1, **env))


def restarting(restarts: int, script: str, *flags) -> subprocess.Popen:
    """A script under torchrun, which restarts its two processes when one has died. One thread each.

    For tests that kill processes. The caller must end it.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", 2, "--max-restarts", restarts, *words(script, *flags)]
    command = [str(word) for word in command]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=ROOT, env=environment(1), start_new_session=True, **quiet)


class Forked:
    """`python script flags`, forked from a process that has imported torch already: this is fast.

    prepare: runs before the script, in its process. It replaces what a test cannot have for real.
    """

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torchvision.transforms.v2"])

    def __init__(self, script: str, *flags, prepare: Callable | None = None, **env):
        self.start_server()
        self.folder = Path(tempfile.mkdtemp())
        inherited = environment(1).items()
        kept = {name: value for name, value in inherited if not name.startswith(LAUNCHERS)}
        kept |= {name: str(value) for name, value in env.items()}
        arguments = (words(script, *flags), kept, self.folder, prepare)
        self.process = self.context.Process(target=self.script, args=arguments)
        self.process.start()

    @staticmethod
    def start_server() -> None:
        """Starts the fork server, if it does not run. It imports torch in today's environment."""
        # Read once, when the fork server starts, and when it imports torch:
        os.environ.pop("PYTHONUNBUFFERED", None)  # lines in one write, as environment() has it
        os.environ["OMP_NUM_THREADS"] = "1"
        forkserver.ensure_running()

    @staticmethod
    def script(argv, env, folder, prepare):
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(ROOT)
        # As in a new Python: the temporary folder, how it starts processes, its warnings.
        tempfile.tempdir = None
        multiprocessing.set_start_method(None, force=True)
        warnings.resetwarnings()
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        warnings.filterwarnings("error", module="__main__")
        if sys.version_info < (3, 11, 10):
            a_moment_before_workers()
        if prepare:
            prepare()
        probed, argv = argv[0] == PROBE, argv[argv[0] == PROBE :]
        # A spy may keep what keeps the group, and so does --max-steps.
        spied = prepare and prepare.__module__ != "real"
        watched = argv[0] in {*SCRIPTS, "imagenet.py"} and not (spied or "--max-steps" in argv)
        sys.argv = [str(ROOT / argv[0]), *argv[1:]]
        try:
            if probed:
                from bench.run.probe import run_script

                run_script(sys.argv)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit:  # imagenet.py always ends so, the others before their first collective
            watched = watched and argv[0] == "imagenet.py"
            raise
        finally:
            left = watched and not isinstance(sys.exc_info()[1], Exception)
            kept = left and sys.modules["torch.distributed"].is_initialized()
            atexit._run_exitfuncs()  # a forked process ends without them
            assert not kept, "it left its group"

    def finish(self, limit: float = 300) -> Finished:
        self.process.join(limit)
        timed_out = self.process.is_alive()
        self.process.kill()
        self.process.join()
        out, err = (
            file.read_text() if (file := self.folder / name).exists() else ""
            for name in ("out", "err")
        )
        shutil.rmtree(self.folder)
        return Finished(self.process.exitcode, out, err, timed_out)


def forked(script: str, *flags, limit: float = 300, **keywords) -> Finished:
    """One such process, run to its end."""
    return Forked(script, *flags, **keywords).finish(limit)


def a_moment_before_workers() -> None:
    """Runs in the script's process: loaders fork their workers when Gloo's threads are idle.

    Otherwise one in about a thousand hangs: https://github.com/python/cpython/issues/112275
    """
    from torch.utils.data import DataLoader

    batches = DataLoader.__iter__

    def late(loader):
        time.sleep(0.1 * (loader.num_workers > 0))
        return batches(loader)

    DataLoader.__iter__ = late


@contextmanager
def one_at_a_time(name: str):
    """Waits while another process is within this: two of pytest-xdist's workers install nothing at
    the same time. The system frees the lock when a process ends.
    """
    (ROOT / ".cache").mkdir(exist_ok=True)
    with open(ROOT / ".cache" / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def started(size: int, script: str, *flags, **keywords) -> list[Forked]:
    """A script for torchrun in this many such processes, with the variables that torchrun sets."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    shared |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **keywords}
    return [Forked(script, *flags, **shared, RANK=r, LOCAL_RANK=r) for r in range(size)]


def world(size: int, script: str, *flags, limit: float = 300, **keywords) -> list[Finished]:
    """The same processes, run to their end."""
    return [rank.finish(limit) for rank in started(size, script, *flags, **keywords)]


def succeeded(*runs: Finished) -> None:
    """Asserts that they ended without an error, or shows their output."""
    for finished in runs:
        assert finished.code == 0 and not finished.timed_out, finished.err + finished.out


def refused(finished: Finished, *words: str, code: int = 1) -> str:
    """Asserts one line on stderr with these words, no traceback, and this exit code; the line.

    A script that ends by sys.exit("...") has exit code 1; the tools have 2. A download's progress
    (12.3%, or tqdm's bar) and torch's note that it ends the other processes do not count.
    """
    assert finished.code == code and "Traceback" not in finished.err, finished
    noise = re.compile(r"\d+\.\d%| *\d+%\|.*|W\d+ .* Terminating process .*|")
    (line,) = {line for line in finished.err.splitlines() if not noise.fullmatch(line)}
    assert all(word in line for word in words), finished.err
    return line


def records(path: Path, event: str | None = None, growing: bool = False) -> list[dict]:
    """The records of a --log-json file, all of them or those of one event. JSON has no nan.

    growing: there may be no file yet, and its last line may still be a part of one.
    """

    def refuse(word: str):
        raise ValueError(f"{word} in {path}, which is not JSON")

    text = path.read_text() if path.exists() or not growing else ""
    text = text[: text.rfind("\n") + 1] if growing else text
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    return [line for line in lines if event in (None, line["event"])]


def fake_ladder(folder: Path) -> Path:
    """A folder in place of the project's, in which fake_script.py is the probe."""
    (folder / PROBE).parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "fake_script.py", folder / PROBE)
    return folder


def wait_until(true: Callable, limit: float = 180) -> None:
    """Waits until something is true."""
    deadline = time.monotonic() + limit
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(log: Path, step: int, starts: int = 1, alive: Callable = lambda: True) -> None:
    """Waits until the run has begun `starts` times and logged this step since, or is dead."""

    def logged() -> bool:
        dead, lines = not alive(), records(log, growing=True)
        begun = [k for k, line in enumerate(lines) if line["event"] == "start"]
        since = lines[begun[starts - 1] :] if len(begun) >= starts else []
        found = any(line["event"] == "train" and line["step"] >= step for line in since)
        assert found or not dead, lines[-3:]
        return found

    wait_until(logged)


def checkpoint(path: Path, classes: int = 10, arch: str = "resnet18") -> dict:
    """The weights in a checkpoint of a script, or in a file of the oracle.

    torch.load must read them with its defaults, which run no code from the file. They must fit
    torchvision's model: no name is missing, and none is too many.
    """
    import torch

    state = torch.load(path)
    weights = state.get("model", state)
    make_model(arch, classes).load_state_dict(weights)
    return weights


def make_model(arch: str, classes: int):
    """torchvision's model of this name, or one of three small ones that it has no name for."""
    from torch import nn
    from torchvision import models

    if arch == "one_layer":  # little to compile

        class OneLayer(nn.Sequential):  # torch.compile skips a forward() that is PyTorch's own
            def forward(self, images):
                return super().forward(images)

        layer = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        return OneLayer(*layer, nn.Flatten(), nn.Linear(8, classes))
    if arch == "resnet10":  # one block in each layer
        return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=classes)
    if arch == "vit_tiny":  # with the numbers of its page
        return models.VisionTransformer(32, 4, 4, 4, 128, 256, num_classes=classes)
    return models.get_model_builder(arch)(num_classes=classes)


def write_photos(folder: Path, per_class: int = 12) -> Path:
    """An ImageFolder tree of 3 classes: JPEGs and one PNG a class, gray and RGB, of many sizes."""
    dice = random.Random(0)
    for part, count in (("train", per_class), ("val", per_class // 2)):
        for label, name in enumerate(("ant", "bee", "cat")):
            (folder / part / name).mkdir(parents=True)
            for k in range(count):
                mode, size = ("L" if k % 3 == 1 else "RGB"), (70 - 2 * k, 40 + 3 * k)
                noise = dice.randbytes(size[0] * size[1] * len(mode))
                shade = bytes(60 * label + value // 4 for value in noise)
                picture = Image.frombytes(mode, size, shade)
                picture.save(folder / part / name / f"{k}.{'jpg' if k else 'png'}")
    return folder


def screen(browser, width: int, scheme: str) -> None:
    """Gives the browser a screen this many pixels wide; scheme: light or dark."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
