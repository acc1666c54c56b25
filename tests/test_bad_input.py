"""What a script refuses by itself, in one line; and what happens when one of its processes ends."""

import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from real import short
from support import (
    Forked,
    forked,
    free_port,
    records,
    refused,
    succeeded,
    wait_for,
    world,
    write_photos,
)

DDP = "mnmc_ddp_launch.py"
PLATFORM = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("script", "launcher", "lacks"),
    [
        (DDP, "torchrun", [*PLATFORM]),
        (DDP, "torchrun", ["RANK"]),
        ("mnmc_ddp_slurm.py", "srun", [*PLATFORM]),
    ],
)
def test_started_without_its_launcher(script, launcher, lacks):
    """Or one variable is missing. If it is the address, PyTorch says so."""
    found = {name: value for name, value in PLATFORM.items() if name not in lacks}
    line = refused(forked(script, **found), f"start this script with {launcher}")
    assert len(line) < 100


VIT = "--arch vit_tiny --images 24 8 --batch-size 12"
# A technique or a script of the ladder, how many processes, its flags, and words of the line.
REFUSED = [
    ("snsc.py", 1, "--batch-size 194", "--batch-size 194: there are 192 training images"),
    (DDP, 3, "", "--batch-size 64: must be a multiple of 3"),
    ("grad_accum", 1, "--accum-steps 3", "--accum-steps"),  # else a wrong mean, and no error
    ("heterogeneous", 2, "--shares 40,20", "--shares: must be 2 numbers with the sum 64"),
    ("invariant", 1, "--shards 5", "--shards 5"),
    ("parameter_server", 1, "", "--nproc-per-node"),
    ("pipeline", 1, "--micro-batches 3", "--batch-size 64: "),
    ("pipeline_by_hand", 1, "--arch densenet121", "--arch: the layers of DenseNet"),
    ("uneven_inputs", 2, "--extra-images 129", "--batch-size 64: there are 63 training images"),
    ("context_parallel", 1, "--arch resnet18", "--arch resnet18: give a vision transformer"),
    ("tensor_parallel_by_hand", 3, VIT, "--nproc-per-node: 3 processes cannot split 4 heads"),
    ("parallel_2d", 2, f"{VIT} --tensor-parallel 3", "--tensor-parallel 3: must divide 2"),
]


@pytest.mark.parametrize(("script", "size", "flags", "line"), REFUSED)
def test_flags_that_do_not_fit(script, size, flags, line):
    """All ranks say so and end."""
    path = script if script.endswith(".py") else f"techniques/{script}.py"
    for done in world(size, path, *short(), *flags.split()):
        refused(done, line)


def test_train_and_val_with_different_class_folders(photos, tmp_path):
    """The labels would not be the same."""
    (write_photos(tmp_path) / "val" / "cat").rename(tmp_path / "cat")
    line = f"--data {tmp_path}: train/ and val/ need equal class folders, no hidden ones"
    for rank in world(2, "mnmc_ddp_launch.py", *photos, "--data", tmp_path):
        refused(rank, line)


def test_too_long_a_folder_for_the_sockets_of_workers(tmp_path):
    """75 bytes are enough: loading ends. With 76, it waited for ever."""
    line = "TMPDIR is too long a path for loader workers, which would hang: set it to /tmp"
    with tempfile.TemporaryDirectory(dir="/tmp") as short_one:
        for length in (75, 76):
            folder = Path(short_one, "é" * 9 + "x" * (length - len(short_one) - 19))
            folder.mkdir()
            assert len(os.fsencode(folder)) == length
            flags = [*short(), "--epochs", 1, "--workers"]
            done = forked("snsc.py", *flags, 1, TMPDIR=folder)
            if length == 75:
                succeeded(done)
            else:
                refused(done, line)


def test_a_place_that_cannot_be_saved_to(tmp_path):
    """Nothing is trained first. Root may write to most folders, but not to these."""
    for place in (tmp_path, "/proc/self/checkpoint.pt"):
        line = f"--save {place}: must be a file, in a folder that is writable"
        refused(forked(DDP, *short(), "--save", place, **PLATFORM, MASTER_PORT=free_port()), line)


def test_a_script_that_must_know_how_many_ranks_a_machine_has():
    done = forked("techniques/hybrid_fsdp.py", *short(), **PLATFORM, MASTER_PORT=free_port())
    refused(done, "--shard-size: needed")


def test_a_loss_that_is_no_number(tmp_path):
    """It is printed as nan, as is the accuracy. In --log-json it is null: JSON has no nan."""
    log = tmp_path / "log.json"
    done = forked("snsc.py", *short(), "--lr", 1e9, "--log-json", log)
    succeeded(done)
    lines = records(log)  # reads only valid JSON
    assert [line["event"] for line in lines][-2:] == ["eval", "end"]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert isinstance(losses[0], float) and losses[-2:] == [None, None]
    # argmax() of NaN logits is some class, often the right one.
    assert lines[-2]["accuracy"] is None
    assert "loss=nan accuracy=nan" in done.out and lines[-2]["images"] == 101


@pytest.mark.full
@pytest.mark.parametrize("act", ["kill one", "interrupt"])
def test_spawned_processes_end_together(act, tmp_path):
    """SIGKILL for one of them, Ctrl-C: soon no process is left."""
    log = tmp_path / "log.json"
    job = Forked("mnmc_ddp_mp.py", *short(), "--epochs", 10_000, "--log-json", log)
    launcher, children = psutil.Process(job.process.pid), []
    try:
        wait_for(log, 1, alive=job.process.is_alive)
        children = [p for p in launcher.children() if "spawn_main" in " ".join(p.cmdline())]
        assert len(children) == 2
        if act == "kill one":
            children[1].kill()
        else:
            for process in (launcher, *children):  # as a terminal does
                process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(children, 240)
        done = job.finish(240)
        assert not alive and not done.timed_out and done.code != 0, done
    finally:
        for process in (launcher, *children):
            if process.is_running():
                process.kill()
