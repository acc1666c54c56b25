"""mnmc_horovod.py under the real horovodrun, with a Horovod that was built for this PyTorch."""

import re
import shutil
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import support
from real import (
    EPOCH,
    STEPS,
    cut_short,
    epoch_oracle,
    kill_one,
    lacking,
    short,
    takes_turns,
    train,
)
from support import forked, refused, words
from test_resume import DDP, goes_on, half, whole

from bench import backends
from bench.cases import Case
from bench.host import look
from bench.process import environment, run

SCRIPT = "mnmc_horovod.py"
SCRIPTS = Path(sysconfig.get_path("scripts"))
# The build takes minutes, and more on a busy machine.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def horovodrun():
    """The command that starts this many processes. Horovod is built first if it is missing."""
    with support.one_at_a_time("install"):
        build()
    return lambda count: [SCRIPTS / "horovodrun", "-np", count, "--gloo"]


def build() -> None:
    """Builds Horovod, or takes the one that fits this PyTorch."""
    if not support.INSTALL and run([sys.executable, "-c", "import horovod.torch"], 60).code:
        lacking("Horovod is not installed: --install builds it into this Python")
    if not shutil.which("g++"):
        lacking("Horovod is built from source, and there is no g++")
    done = run(["bash", "bench/install_horovod.sh"], 1200, environment(PYTHON=sys.executable))
    if done.code == 2:
        lacking(done.last_line)
    assert done.code == 0, done.err
    assert "[X] PyTorch" in done.out and "[X] Gloo" in done.out, done.out


@pytest.fixture(scope="module")
def started(horovodrun):
    """Runs a script in this many processes; runner: a program that starts it."""

    def started(count, script, *flags, runner=()):
        command = [*horovodrun(count), sys.executable, *runner, *words(script, *flags)]
        return run(command, 300, environment(1))

    return started


DIFFERENT = """
import os, runpy, sys, torch
rank = int(os.environ["HOROVOD_RANK"])
seed = torch.manual_seed
torch.manual_seed = lambda number: seed(number + 7 * rank)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_two_processes_train_what_the_oracle_trains(started, tmp_path):
    """Bit for bit over an epoch, from the weights of rank 0, whatever the others make; the
    checkpoint is that of the other scripts.
    """
    runner = tmp_path / "different.py"
    runner.write_text(DIFFERENT)
    two = train(partial(started, 2, runner=[runner]), SCRIPT, *EPOCH)
    two.equals(epoch_oracle(2))
    assert len(two.losses) == STEPS and [*two.saved] == ["model", "optimizer", "epoch"]
    assert "world_size=2 " in two.out


def test_a_resumed_run_goes_on_with_the_same_digits(started):
    """From the file of mnmc_ddp_launch.py: losses, weights and momentum."""
    goes_on(train(partial(started, 2), SCRIPT, *short(), "--resume", half(DDP)), whole(DDP))


def test_a_case_of_the_harness(horovodrun):
    """It takes turns under its launcher, and its row says how Horovod was built."""
    takes_turns("horovod-turns", horovodrun(2), SCRIPT)
    backend = backends.carrier(Case("x2", SCRIPT, "horovodrun", 2), look())
    assert re.fullmatch(r"horovod 0\.28\.1 built with (\w+, )*gloo(, cuda)?", backend)


def test_a_job_cut_short_ends_whole(horovodrun, monkeypatch):
    """SIGKILL of a process: the job ends, says so, and leaves no process."""
    done = cut_short("horovod-kill", horovodrun(2), SCRIPT, "HOROVOD_RANK", kill_one, monkeypatch)[
        0
    ]
    assert done.code != 0
    assert re.search(r"Process name: 1\s+Exit code: 137", done.out + done.err), done


def test_refuses_to_start_outside_of_horovodrun(horovodrun):
    """A plain `python mnmc_horovod.py` would train with one process."""
    refused(forked(SCRIPT), "start this script with horovodrun")


def without_nccl(place: Path) -> None:
    """Runs in the script's process: a Horovod that consists of one line, and one GPU."""
    package = place / "horovod" / "torch"
    package.mkdir(parents=True)
    (place / "horovod" / "__init__.py").touch()
    says = "init = rank = local_rank = nccl_built = lambda: 0; size = lambda: 1"
    (package / "__init__.py").write_text(says)
    sys.path.insert(0, str(place))
    import torch

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1


def test_refuses_a_horovod_without_nccl(tmp_path):
    """Its gradients would cross the CPU."""
    done = forked(SCRIPT, prepare=partial(without_nccl, tmp_path), HOROVOD_RANK=0)
    refused(done, "without NCCL")
