"""techniques/accelerate_ddp.py, fabric_ddp.py, deepspeed_zero.py: the numbers of the oracle."""

import sys
import sysconfig
from functools import cache, partial

import pytest
import torch
from real import TEST_IMAGES, Trained, oracle, short, train
from support import ROOT, free_port, records, succeeded, world
from test_resume import goes_on

from bench.process import environment, run

ACCELERATE = "techniques/accelerate_ddp.py"
FABRIC = "techniques/fabric_ddp.py"
DEEPSPEED = "techniques/deepspeed_zero.py"
# Fabric asks PyTorch whether torchrun has started it, and PyTorch looks for this.
STARTED = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": 0}
start = partial(world, limit=600, **STARTED)
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("libraries")]


def losses(log) -> list[float]:
    """The loss of each step in a --log-json file."""
    return [line["loss"] for line in records(log, "train")]


@cache
def trained(script: str) -> Trained:
    return train(partial(start, 2), script, *short())


@pytest.mark.parametrize(("script", "split"), [(ACCELERATE, "contiguous"), (FABRIC, "strided")])
def test_a_wrapped_script_trains_what_the_oracle_trains(script, split):
    """Bit for bit. Accelerate's loader gives each rank neighbors of the global batch."""
    trained(script).equals(oracle(2, "--split", split))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_trains_what_the_oracle_trains(stage):
    """Other numbers are the last ones of their tensor, and PyTorch's fused SGD rounds these
    otherwise. When this reaches a loss depends on the CPU: docs/diffs/deepspeed_zero.md.

    Of the test images, rank 0 has 51 in batches of 25, one batch more than rank 1. In stage 3 each
    batch is a collective.
    """
    odd = [*short(), "--batch-size", 50]
    found = train(partial(start, 2), DEEPSPEED, *odd, "--stage", stage)
    right = oracle(2, "--batch-size", 50)
    assert found.losses[:3] == right.losses[:3]
    assert found.losses == pytest.approx(right.losses, rel=0.3)
    assert [line["images"] for line in found.evaluations] == [TEST_IMAGES] * 2


@pytest.mark.parametrize("script", [ACCELERATE, FABRIC])
def test_resuming_gives_the_same_digits(script, tmp_path):
    two, file = partial(start, 2), tmp_path / "one.pt"
    succeeded(*two(script, *short(), "--epochs", 1, "--save", file))
    goes_on(train(two, script, *short(), "--resume", file), trained(script))


def test_all_scripts_resume_a_file_of_deepspeeds(tmp_path):
    """With its momentum. DeepSpeed itself restores only the weights: its first loss is the same."""
    own = ["--stage", 3]
    file, log = tmp_path / "one.pt", tmp_path / "log.jsonl"
    flags = [*short(), "--log-json", log]
    succeeded(*start(2, DEEPSPEED, *short(), *own, "--epochs", 1, "--save", file))
    for script, more in [("mnmc_ddp_launch.py", []), (DEEPSPEED, own)]:
        succeeded(*start(2, script, *flags, "--resume", file, *more))
    plain, sharded, right = losses(log)[:3], losses(log)[3:], oracle(2).losses[3:]
    assert plain[0] == sharded[0] == right[0]
    assert plain == pytest.approx(right, rel=1e-3)
    assert sharded[1] != pytest.approx(right[1], rel=1e-3)


def test_deepspeeds_own_launcher(tmp_path):
    """It gives each process a flag, --local_rank."""
    deepspeed = sysconfig.get_path("scripts") + "/deepspeed"
    launcher = [sys.executable, deepspeed, "--num_gpus", 2, "--master_port", free_port()]
    flags = [*short(), "--epochs", 1, "--save", tmp_path / "one.pt"]
    done = run([*launcher, ROOT / DEEPSPEED, *flags], 600, environment(1, DS_ACCELERATOR="cpu"))
    succeeded(done)
    assert "world_size=2" in done.out and "local_rank=0" in done.out
    assert torch.load(tmp_path / "one.pt")["epoch"] == 1
