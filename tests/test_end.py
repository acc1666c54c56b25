"""With its process group each script ends Gloo's threads (docs/ladder/mnmc_ddp_launch.md, 21)."""

import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from real import FLAGS, output
from support import ROOT, succeeded, world

FILES = {path.name: path for path in (ROOT / "techniques").glob("*.py")}
LIBRARIES = {"accelerate_ddp.py", "fabric_ddp.py", "deepspeed_zero.py"}
KEPT = {"fsdp.py", "deepspeed_zero.py"}  # what they use keeps the group until Python ends
PLAIN = sorted(
    name
    for name, path in FILES.items()
    if "dist.destroy_process_group()" in path.read_text() and name not in LIBRARIES
)


def threads() -> int:
    """Gloo's threads in this process that have to do with tensors."""
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


def left(script: str, *flags) -> int:
    """The threads behind a script's end."""
    # compile.py's wrapper, without the minute of compiling. (With it there are none left, either.)
    (done,) = world(1, script, *flags, prepare=counted, TORCHDYNAMO_DISABLE=1)
    succeeded(done)
    ((_, before, after),) = (
        line.split() for line in done.out.splitlines() if line.startswith("threads ")
    )
    assert before == "True"
    return int(after)


def short(name: str) -> list:
    """The flags of one step; collectives.py has none."""
    return [] if name == "collectives.py" else [*FLAGS, "--max-steps", 1, *output(f"end-{name}")]


def test_of_the_parent():
    assert left("mnmc_ddp_launch.py", *short("mnmc_ddp_launch.py")) == 0


@pytest.mark.parametrize("name", PLAIN)
def test_of_a_technique(name):
    kept = left(f"techniques/{name}", *short(name)) > 0
    assert kept == (name in KEPT)


@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_of_a_library(libraries, name):
    kept = left(f"techniques/{name}", *short(name)) > 0
    assert kept == (name in KEPT)


def test_of_the_recipe(small_run, tmp_path):
    assert left("imagenet.py", *small_run, "--out", tmp_path, "--max-steps", 1) == 0
