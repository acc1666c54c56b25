"""Each script ends its process group, and Gloo's threads with it."""

import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from real import short
from support import ROOT, succeeded, world

from bench import ladder

FILES = {path.name: path for path in (ROOT / "techniques").glob("*.py")}
SRUN = {"STEP_NODELIST": "node1", "STEP_NUM_TASKS": 1, "JOB_ID": 1, "PROCID": 0, "LOCALID": 0}
SRUN = {f"SLURM_{name}": value for name, value in SRUN.items()}
LIBRARIES = {"accelerate_ddp.py", "fabric_ddp.py", "deepspeed_zero.py"}
KEPT = {
    "fsdp.py",
    "hybrid_fsdp.py",
    "deepspeed_zero.py",
    "tensor_parallel.py",
    "parallel_2d.py",
    "parallel_3d.py",
}  # their libraries keep the group until Python ends
PLAIN = sorted(
    name
    for name, path in FILES.items()
    if "dist.destroy_process_group()" in path.read_text() and name not in LIBRARIES
    if name != "parameter_server.py"  # it does not run in one process
)


def threads() -> int:
    """The number of this process's threads in which Gloo handles tensors."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            count += (task / "comm").read_text().startswith("pt_gloo")
    return count


def counted():
    """Runs in the script's process: prints how many there are before and after."""
    destroy = dist.destroy_process_group

    def destroy_process_group(*words):
        before = threads()
        destroy(*words)
        late = time.monotonic() + 2  # the system lists a thread a moment longer than it lives
        while threads() and time.monotonic() < late:
            time.sleep(0.01)
        print("threads", before > 0, threads(), flush=True)

    dist.destroy_process_group = destroy_process_group


def left(script: str, *flags, **env) -> int:
    """The threads that a script leaves."""
    # compile.py's wrapper, without a minute of compiling, which leaves no threads either.
    (done,) = world(1, script, *flags, prepare=counted, TORCHDYNAMO_DISABLE=1, **env)
    succeeded(done)
    ((_, before, after),) = (
        line.split() for line in done.out.splitlines() if line.startswith("threads ")
    )
    assert before == "True"
    return int(after)


def flags(name: str) -> list:
    """The flags of an epoch of three steps; collectives.py has none."""
    script = ladder.SCRIPTS.get(f"techniques/{name}")
    more = ["--arch", script.arch] if script and script.arch else []
    more += ["--tensor-parallel", 1] if name in ("parallel_2d.py", "parallel_3d.py") else []
    more += ["--pipeline-parallel", 1] if name == "parallel_3d.py" else []
    return [] if name == "collectives.py" else [*short(), "--epochs", 1, *more]


@pytest.mark.parametrize("name", ["mnmc_ddp_launch.py", "mnmc_ddp_slurm.py"])
def test_of_the_ladder(name):
    assert left(name, *flags(name), **SRUN) == 0


@pytest.mark.full
@pytest.mark.parametrize("name", PLAIN)
def test_of_a_technique(name):
    kept = left(f"techniques/{name}", *flags(name)) > 0
    assert kept == (name in KEPT)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_of_a_library(libraries, name):
    kept = left(f"techniques/{name}", *flags(name)) > 0
    assert kept == (name in KEPT)


@pytest.mark.full
def test_of_the_recipe(small_run, tmp_path):
    assert left("imagenet.py", *small_run, "--out", tmp_path, "--max-steps", 1) == 0
