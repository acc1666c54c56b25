"""The techniques that are a library: accelerate_ddp.py, fabric_ddp.py, deepspeed_zero.py.

What each trains is compared with the oracle: bit for bit for two processes, in training. A test of
101 images in other batches is summed in another order: 1e-6.
"""

import sys
import sysconfig

import pytest
from real import FLAGS, TEST_IMAGES, compare, numbers, oracle, output
from support import ORACLE, checkpoint, forked, free_port, records, refused, succeeded, world

from bench import ROOT
from bench.measure.process import environment, run

SCRIPTS = {
    "techniques/accelerate_ddp.py": "accelerate",
    "techniques/fabric_ddp.py": "lightning_fabric",
    "techniques/deepspeed_zero.py": "deepspeed",
}
ACCELERATE, FABRIC, DEEPSPEED = SCRIPTS
# Fabric asks torch whether it was started by torchrun, and torch looks for this.
STARTED = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": 0}


def train(script: str, processes: int, *more) -> tuple[list[tuple], dict, dict]:
    """The numbers, the weights and the last record of a run."""
    name = "-".join(map(str, [script.split("/")[1], processes, *more]))
    flags = [*FLAGS, *more, *output(name)]
    weights = flags[-1].with_suffix(".pt")
    succeeded(*world(processes, script, *flags, "--save", weights, limit=600, **STARTED))
    return numbers(flags), checkpoint(weights), records(flags[-1], "end")[0]


def exact(processes: int, *more) -> tuple[list[tuple], dict]:
    """The oracle's numbers and weights."""
    name = "-".join(map(str, ["exact", processes, *more]))
    flags = [*FLAGS, *more, *output(name), "--parts", processes]
    weights = flags[flags.index("--log-json") + 1].with_suffix(".pt")
    succeeded(forked(ORACLE, *flags, "--save", weights))
    return numbers(flags), checkpoint(weights)


def alike(script: str, *more, split: str = "strided", off: float = 0) -> dict:
    """Two processes' numbers must be the oracle's, to the last bit, and no weight further off than
    this; the last record.
    """
    found, weights, end = train(script, 2, *more)
    right, others = exact(2, "--split", split)
    compare(found, right, tolerance=0)
    assert weights.keys() == others.keys()
    most = {n: (v.double() - others[n].double()).abs().max().item() for n, v in weights.items()}
    assert all(each <= off for each in most.values()), most
    return end


def test_accelerate_trains_what_the_oracle_trains(libraries):
    """Its loader gives each process neighbours of the batch."""
    alike(ACCELERATE, split="contiguous")


def test_fabric_trains_what_the_oracle_trains(libraries):
    alike(FABRIC)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_trains_what_the_oracle_trains(libraries, stage):
    """In every stage, and the weights are whole in the file; the momentum is in parts from stage 1
    on.
    """
    # Stage 3 has its weights in one row, in which the fused step may round a last digit otherwise.
    end = alike(DEEPSPEED, "--stage", stage, off=1e-8 if stage == 3 else 0)
    whole = 4 * 11_181_642 / 2**20
    assert end["optimizer_mib"] == pytest.approx(whole / (2 if stage else 1), rel=0.01)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("processes", [1, 3])
def test_other_numbers_of_processes(libraries, script, processes):
    """One is no special case; of a sum of three the order is not given."""
    more = ["--max-steps", 2, "--batch-size", 24]
    more += ["--stage", 3] if script == DEEPSPEED else []
    found, _, _ = train(script, processes, *more)
    split = "contiguous" if script == ACCELERATE else "strided"
    compare(found, exact(processes, *more[:4], "--split", split)[0], tolerance=1e-5)


def test_deepspeed_tests_with_one_batch_more_in_one_process(libraries):
    """51 and 50 images in batches of 25: in stage 3 each batch is a collective."""
    found, _, _ = train(DEEPSPEED, 2, "--stage", 3, "--batch-size", 50, "--max-steps", 1)
    assert found[-1][0] == ("eval", 1, None, TEST_IMAGES)


def missing_library() -> None:
    """Runs in the script's process: none of the libraries can be imported."""
    sys.modules |= dict.fromkeys(SCRIPTS.values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_the_library(script):
    """One line that names the command; before anybody waits for others."""
    flags = [*FLAGS, *output("no-library")]
    for done in world(1, script, *flags, prepare=missing_library):
        refused(done, "bash bench/install_techniques.sh")
    assert not flags[-1].exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_started_by_nobody(libraries, script):
    refused(forked(script, *FLAGS, *output("alone")), "RANK", "torchrun")


def test_a_stage_that_there_is_not():
    refused(forked(DEEPSPEED, "--stage", 4), "--stage", "from 0 to 3")


def test_deepspeeds_own_launcher(libraries):
    """It names the processes in its own way, and gives each a flag."""
    deepspeed = sysconfig.get_path("scripts") + "/deepspeed"
    flags = [*FLAGS, "--max-steps", 1, *output("launcher")]
    launcher = [sys.executable, deepspeed, "--num_gpus", 2, "--master_port", free_port()]
    command = [*launcher, ROOT / DEEPSPEED, *flags]
    succeeded(run(command, 600, environment(1, DS_ACCELERATOR="cpu")))
    start = records(flags[-1], "start")[0]
    assert start["world_size"] == 2 and start["local_rank"] == "0"
    assert numbers(flags)[0] == oracle(2)[0]


def test_the_installer_needs_a_torch(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = run(["bash", "bench/install_techniques.sh"], 60, environment(PYTHON=str(python)))
    refused(done, "install_techniques.sh: ", "no torch", "PYTHON")


def test_the_lock_leaves_torch_and_the_tools_alone():
    """It names nothing that another lock names, and all by exact version."""
    locks = {}
    for name in ("techniques", "torch", "torch-cu126", "tools"):
        text = (ROOT / "requirements" / f"{name}.lock").read_text()
        lines = [line.split(";")[0] for line in text.splitlines() if not line.startswith("#")]
        assert all("==" in line for line in lines)
        locks[name] = {line.split("==")[0].strip() for line in lines}
    ours = locks.pop("techniques")
    assert ours >= {"accelerate", "deepspeed", "lightning-fabric", "nvidia-dali-cuda130"}
    assert not ours & set().union(*locks.values())
