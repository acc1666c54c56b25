"""mnmc_horovod.py under the real horovodrun, with a Horovod that was built for this torch."""

import re
import shutil
import signal
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import support
from real import (
    CLEAN_UP,
    FLAGS,
    compare,
    cut_short,
    folder,
    kill_one,
    lacking,
    members,
    numbers,
    oracle,
    output,
    takes_turns,
)
from support import checkpoint, forked, records, refused, succeeded

from bench import backends
from bench.cases import Case
from bench.host import look
from bench.measure.process import environment, run

SCRIPT = "mnmc_horovod.py"
SCRIPTS = Path(sysconfig.get_path("scripts"))
pytestmark = pytest.mark.timeout(1500)  # the build: minutes, and more on a busy machine


@pytest.fixture(scope="module")
def horovodrun():
    """The command that starts so many processes; Horovod is built first, where it is not there."""
    if not support.INSTALL and run([sys.executable, "-c", "import horovod.torch"], 60).code:
        lacking("Horovod is not installed: --install builds it into this Python")
    if not shutil.which("g++"):
        lacking("Horovod is built from source, and there is no g++")
    done = run(["bash", "bench/install_horovod.sh"], 1200, environment(PYTHON=sys.executable))
    if done.code == 2:
        lacking(done.last_line)
    assert done.code == 0, done.err
    assert "[X] PyTorch" in done.out and "[X] Gloo" in done.out, done.out
    return lambda count: [SCRIPTS / "horovodrun", "-np", count, "--gloo"]


@pytest.fixture(scope="module")
def train(horovodrun):
    """The records of a run of so many processes; of a runner, where one is named."""

    def train(name, count, *more, runner=()):
        flags = [*FLAGS, *more, *output(name)]
        weights = flags[-1].with_suffix(".pt")
        command = [*horovodrun(count), sys.executable, *runner, SCRIPT, "--save", weights, *flags]
        succeeded(run(command, 180, environment(1)))
        checkpoint(weights)
        return numbers(flags)

    return train


@pytest.mark.parametrize("count", [2, 4])
def test_processes_train_what_the_oracle_trains(train, count):
    """Losses and counts over all processes, and every test image once; bit for bit for two."""
    tolerance = 0 if count == 2 else 1e-5  # a sum of two has one order
    compare(train(f"horovod{count}", count), oracle(count), tolerance)


def test_a_case_of_the_harness(horovodrun):
    """It takes turns under its launcher, and its row says what was built."""
    takes_turns("horovod-turns", horovodrun(2), SCRIPT)
    backends.no_horovod.cache_clear()  # it was not there when another test asked
    backend = backends.carrier(Case("x2", SCRIPT, "horovodrun", 2), look())
    assert re.fullmatch(r"horovod 0\.28\.1 built with (\w+, )*gloo(, cuda)?", backend)


def test_halved_traffic(train):
    """--fp16-allreduce does something, and little of it. Of three seeds the second loss was off by
    1e-5 to 3e-5, and, as BatchNorm makes it grow, the third by 1.4e-3 to 4.5e-3.
    """
    found = train("horovod-fp16", 2, "--fp16-allreduce")
    compare(found, oracle(2), tolerance=2e-2)
    assert found[1][1] == pytest.approx(oracle(2)[1][1], rel=2e-4)
    assert [line[1] for line in found] != [line[1] for line in oracle(2)]


DIFFERENT = """
import os, resource, runpy, sys, time, torch
from types import SimpleNamespace
from torch.utils.data import DataLoader
rank = int(os.environ["HOROVOD_RANK"])
seed, batches = torch.manual_seed, DataLoader.__iter__
torch.manual_seed = lambda number: seed(number + 7 * rank)
def late(loader):
    time.sleep(rank)
    return batches(loader)
DataLoader.__iter__ = late
resource.getrusage = lambda who: SimpleNamespace(ru_maxrss=2**20 * (3 + rank))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def different(train):
    """Two processes, of which the second begins with other weights, is late and takes more memory:
    their records, and the log.
    """
    runner = folder() / "different.py"
    runner.write_text(DIFFERENT)
    found = train("horovod-different", 2, runner=[runner])
    return found, folder() / "horovod-different.jsonl"


def test_the_weights_are_those_of_process_0(different):
    """Processes that begin with other weights train the same."""
    compare(different[0], oracle(2), tolerance=0)


def test_the_slowest_and_the_largest_process_are_logged(different):
    """What process 0 alone would log: no wait, and 3 GiB."""
    first, *_ = records(different[1], "train")
    (end,) = records(different[1], "end")
    assert 1 <= first["data_seconds"] <= first["seconds"] + 0.1
    assert end["peak_memory_mib"] == 4096


@pytest.mark.parametrize("act", ["kill", "interrupt"])
def test_a_job_cut_short_ends_whole(horovodrun, act, monkeypatch):
    """SIGKILL of a process, Ctrl-C: the job ends, says so, and leaves no process."""

    def interrupt(ranks):
        job = members(ranks["0"].environ()["TEST_TAG"])
        launcher = next(p for p in job if str(SCRIPTS / "horovodrun") in p.cmdline())
        launcher.send_signal(signal.SIGINT)

    cut = kill_one if act == "kill" else interrupt
    arguments = (f"horovod-{act}", horovodrun(2), SCRIPT, "HOROVOD_RANK", cut, monkeypatch)
    done, seconds = cut_short(*arguments)
    assert done.code != 0 and seconds < CLEAN_UP, (done, seconds)
    if act == "kill":
        assert re.search(r"Process name: 1\s+Exit code: 137", done.out + done.err), done


def test_refuses_to_start_outside_of_horovodrun():
    """A plain `python mnmc_horovod.py` would train alone, and be called Horovod."""
    refused(forked(SCRIPT), "HOROVOD_RANK", "horovodrun")


def horovod_that(says: str, place: Path, gpu: bool) -> None:
    """Puts a Horovod that consists of this line before any other, with a GPU or without."""
    package = place / "horovod" / "torch"
    package.mkdir(parents=True)
    (place / "horovod" / "__init__.py").touch()
    (package / "__init__.py").write_text(says)
    sys.path.insert(0, str(place))
    if gpu:
        import torch

        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 1


FALSE = {
    "built for another torch": "raise ImportError('mpi_lib_v2.so: undefined symbol: _ZN3c105')",
    "without its library": "",  # what a failed build leaves: it can be imported
    "without NCCL": "init = rank = local_rank = nccl_built = lambda: 0; "
    "size = local_size = lambda: 1",
}


@pytest.mark.parametrize(
    "kind, said",
    [
        ("built for another torch", ["undefined symbol", "bench/install_horovod.sh"]),
        ("without its library", ["horovod.torch", "bench/install_horovod.sh"]),
        ("without NCCL", ["NCCL", "--device cpu"]),  # its gradients would cross the CPU
    ],
)
def test_refuses_a_horovod_that_does_not_fit(kind, said, tmp_path):
    """One line that says what is wrong, and what helps."""
    prepare = partial(horovod_that, FALSE[kind], tmp_path, gpu=kind == "without NCCL")
    refused(forked(SCRIPT, prepare=prepare, HOROVOD_RANK=0), *said)


def test_the_installer_says_why_it_cannot_build(tmp_path):
    """No torch, or no compiler: one line and exit code 2."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = run(["bash", "bench/install_horovod.sh"], 60, environment(PYTHON=str(python)))
    refused(done, "no torch", "PYTHON")


def test_the_installer_without_a_compiler(tmp_path):
    """A Python whose torch has no wheel in the cache, on a machine that cannot build one."""
    python = tmp_path / "python"
    facts = ["9.9.9+x cp399 cpu", "x86_64 gloo none missing", f"{tmp_path} none none"]
    python.write_text("#!/bin/sh\nprintf '%s\\n' " + " ".join(f"'{fact}'" for fact in facts))
    python.chmod(0o755)
    env = environment(PYTHON=str(python), HOROVOD_WHEELS=str(tmp_path), CXX="no-such-compiler")
    refused(run(["bash", "bench/install_horovod.sh"], 60, env), "no-such-compiler")
