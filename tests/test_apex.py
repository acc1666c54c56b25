"""mnmc_apex.py with a real tree of Apex: its amp, and PyTorch's DDP, as Apex's needs a GPU."""

import os
import shutil
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from real import EPOCH, STEPS, epoch_oracle, folder, lacking, short, train
from spies import ALWAYS, at_calls, at_the_end, said, tell
from support import (
    forked,
    one_at_a_time,
    refused,
    succeeded,
    torchrun,
    world,
)
from test_resume import DDP, goes_on, half, whole

from bench import ROOT
from bench.process import environment, run

pytestmark = pytest.mark.full

SCRIPT = "mnmc_apex.py"
# A re-upload of Apex's tree of 2023-10-03. Its amp and parallel are as in 25.05, the last release
# that has them. Only for this test. The wheels are for an older Python, but amp is plain Python.
PINNED = "apex-personal==0.1 --hash=sha256:"
PINNED += "7b70c792467c44680c3537a480f1caf0ed84bd9feaa5a496f807f7d15e4ad7c7\n"
WHEEL = ["--no-deps", "--only-binary=:all:", "--python-version=3.10", "--require-hashes"]


@pytest.fixture(scope="module")
def apex() -> str:
    """A folder with that tree, downloaded once."""
    with one_at_a_time("install"):
        return downloaded()


def downloaded() -> str:
    """The folder, after the download if it is missing."""
    place = ROOT / ".cache" / "apex-personal-0.1"
    if not (place / "apex" / "amp").is_dir():
        part = place.with_name(f"{place.name}.{os.getpid()}.part")
        pins = folder() / "apex.txt"
        pins.write_text(PINNED)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *WHEEL]
        command += ["--platform=manylinux2014_x86_64", "--target", part, "-r", pins]
        done = run(command, 300)
        if done.code and "HASH" not in done.err:
            lacking(f"apex-personal could not be downloaded: {done.last_line}")
        assert done.code == 0, done.err
        shutil.rmtree(place, ignore_errors=True)
        part.rename(place)
    return str(place)


def test_two_processes_train_what_the_oracle_trains(apex):
    """On a CPU amp is off. Bit for bit over an epoch, by Apex's initialize and
    scale_loss; the checkpoint is that of the other scripts.
    """
    two = train(partial(torchrun, 2, PYTHONPATH=apex), SCRIPT, *EPOCH, "--opt-level", "O0")
    two.equals(epoch_oracle(2))
    assert len(two.losses) == STEPS and [*two.saved] == ["model", "optimizer", "epoch"]
    assert "world_size=2 " in two.out and "opt_level=O0" in two.out


def counted(place: str) -> None:
    """Runs in the script's process: it finds this Apex, and tells how often it called it."""
    sys.path.append(place)
    calls = Counter()

    def count(name, call, *arguments, **named):
        calls[name] += 1
        return call(*arguments, **named)

    for name in ("initialize", "scale_loss"):
        at_calls(ALWAYS, f"apex.amp.{name}", partial(count, name))
    at_the_end(lambda: tell("calls", calls))


def test_a_resumed_run_goes_on_with_the_same_digits(apex):
    """From the file of mnmc_ddp_launch.py. Every step goes through Apex."""
    start = partial(world, 2, prepare=partial(counted, apex))
    run = train(start, SCRIPT, *short(), "--resume", half(DDP))
    goes_on(run, whole(DDP))
    assert said(run.out, "calls") == [{"initialize": 1, "scale_loss": 3}]


# What O1 does to torch's operations, for which amp.initialize would need a GPU, and the metrics.
PATCHED = """
import runpy
import torch
torch.cuda.IntTensor = torch.IntTensor
from apex.amp import amp
amp.init(enabled=True, enable_caching=True, verbose=False, allow_banned=False)
meter = runpy.run_path("mnmc_apex.py")["Meter"]("cpu")
logits, labels = torch.zeros(4, 10), torch.zeros(4, dtype=torch.long)
for _ in range(2):
    meter.add(torch.nn.functional.cross_entropy(logits, labels), logits, labels)
print(*meter.sums.tolist())
"""


def test_the_metrics_work_with_what_o1_patches(apex):
    """Apex refuses `+=` of a float to a double tensor."""
    done = run([sys.executable, "-c", PATCHED], 100, environment(1, PYTHONPATH=apex), ROOT)
    succeeded(done)
    loss, correct, images = map(float, done.out.split("\n")[-2].split())
    assert loss == pytest.approx(8 * 2.302585) and (correct, images) == (8, 8)


def apex_that(says: str | None, place: Path) -> None:
    """Puts an Apex that consists of this line before all others; None: there is no Apex."""
    sys.path[:] = [path for path in sys.path if not (Path(path) / "apex").is_dir()]
    if says is not None:
        (place / "apex").mkdir()
        (place / "apex" / "__init__.py").write_text(says)
        sys.path.insert(0, str(place))


@pytest.mark.parametrize(
    "says", ["import pyramid_mailer", None], ids=["the_unrelated_one_of_PyPI", "missing"]
)
def test_refuses_what_is_not_the_right_apex(says, tmp_path):
    """One line: what is missing, and which page says which Apex has it."""
    done = forked(SCRIPT, prepare=partial(apex_that, says, tmp_path))
    refused(done, "no apex.amp", "docs/howto/install.md")
