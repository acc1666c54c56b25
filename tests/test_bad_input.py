"""What a script refuses by itself, in one line; and what happens when one of its processes ends."""

import json
import math
import os
import shutil
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from real import short
from support import (
    Forked,
    forked,
    free_port,
    full,
    records,
    refused,
    succeeded,
    wait_for,
    world,
    write_photos,
)

from bench import oracle

PLATFORM = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("script", "launcher"), [("mnmc_ddp_launch.py", "torchrun"), ("mnmc_ddp_slurm.py", "srun")]
)
def test_started_without_its_launcher(script, launcher):
    line = refused(forked(script), f"start this script with {launcher}")
    assert len(line) < 100


@pytest.mark.parametrize(("size", "batch"), [(3, 64), (2, 1)])
def test_a_batch_that_is_no_multiple_of_the_processes(size, batch):
    """All ranks say so and end."""
    ranks = world(size, "mnmc_ddp_launch.py", *short(), "--batch-size", batch)
    for rank in ranks:
        refused(rank, f"--batch-size {batch}: must be a multiple of {size}")


def test_a_batch_larger_than_the_set():
    """A batch that is the whole set is trained."""
    line = "--batch-size 194: there are 192 training images"
    refused(forked("snsc.py", *short(), "--batch-size", 194), line)
    for rank in world(2, "mnmc_ddp_launch.py", *short(), "--batch-size", 194):
        refused(rank, line)
    done = forked("snsc.py", *short(), "--batch-size", 192)
    succeeded(done)
    assert done.out.count("step=1 ") == 2


@pytest.mark.parametrize("missing", ["train", "val"])
def test_train_and_val_with_different_class_folders(missing, photos, tmp_path):
    """The labels would not be the same."""
    (write_photos(tmp_path) / missing / "cat").rename(tmp_path / "cat")
    line = f"--data {tmp_path}: train/ and val/ need equal class folders, no hidden ones"
    for rank in world(2, "mnmc_ddp_launch.py", *photos, "--data", tmp_path):
        refused(rank, line)


@pytest.mark.parametrize("empty", [False, True])
def test_hidden_folders_are_no_classes(empty, photos, tmp_path):
    """Jupyter's .ipynb_checkpoints counted as a class. Without images, torchvision refuses it."""
    tree = write_photos(tmp_path / "photos", 2)
    for folder in (tree / "train", tree / "val"):
        (folder / ".ipynb_checkpoints").mkdir()
        if not empty:
            shutil.copy(folder / "ant" / "0.png", folder / ".ipynb_checkpoints")
    done = forked("snsc.py", *photos, "--data", tree)
    if not empty:
        refused(done, "train/ and val/ need equal class folders, no hidden ones")
    assert done.code == 1 and "start" not in done.out


def test_too_long_a_folder_for_the_sockets_of_workers(tmp_path):
    """75 bytes are enough: loading ends. With 76, it waited for ever."""
    line = "TMPDIR is too long a path for loader workers, which would hang: set it to /tmp"
    with tempfile.TemporaryDirectory(dir="/tmp") as short_one:
        for length in (75, 76):
            folder = Path(short_one, "é" * 9 + "x" * (length - len(short_one) - 19))
            folder.mkdir()
            assert len(os.fsencode(folder)) == length
            flags = [*short(), "--epochs", 1, "--workers"]
            done = forked("snsc.py", *flags, 1, TMPDIR=folder, limit=60)
            if length == 75:
                succeeded(done)
            else:
                refused(done, line)
        succeeded(forked("snsc.py", *flags, 0, TMPDIR=folder))
        for rank in world(2, "mnmc_ddp_launch.py", *flags, 1, TMPDIR=folder):
            refused(rank, line)


@pytest.mark.parametrize("script", ["snsc.py", "mnmc_ddp_launch.py"])
def test_a_place_that_cannot_be_saved_to(script, tmp_path):
    """Nothing is trained first. Root may write to most folders, but not to these."""
    env = {} if script == "snsc.py" else {**PLATFORM, "MASTER_PORT": free_port()}
    for place in (tmp_path, "/proc/self/checkpoint.pt"):
        line = f"--save {place}: must be a file, in a folder that is writable"
        refused(forked(script, *short(), "--save", place, **env), line)


def test_ranks_from_a_platform_with_one_process_per_container():
    """Kubernetes' PyTorchJob, for example, sets these four variables, and no LOCAL_RANK."""
    flags = [*short(), "--epochs", 1]
    succeeded(forked("mnmc_ddp_launch.py", *flags, **PLATFORM, MASTER_PORT=free_port()))


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_ranks_of_which_one_variable_is_missing(missing):
    """No KeyError. If the address is missing, PyTorch says so."""
    found = {name: value for name, value in PLATFORM.items() if name != missing}
    refused(forked("mnmc_ddp_launch.py", **found), "start this script with torchrun")


@pytest.mark.parametrize("script", ["hybrid_fsdp.py", "fabric_ddp.py"])
def test_scripts_that_must_know_how_many_ranks_a_machine_has(script):
    if script == "fabric_ddp.py":
        pytest.importorskip("lightning_fabric")
    line = {"hybrid_fsdp.py": "--shard-size: needed", "fabric_ddp.py": "start this script with"}
    flags = [*short(), "--device", "cpu"]
    done = forked(f"techniques/{script}", *flags, **PLATFORM, MASTER_PORT=free_port())
    refused(done, line[script])


def test_a_loss_that_is_no_number(tmp_path):
    """It is printed as nan, as is the accuracy. In --log-json it is null: JSON has no nan."""
    log = tmp_path / "log.json"
    done = forked("snsc.py", *short(), "--lr", 1e9, "--log-json", log)
    succeeded(done)
    lines = records(log)  # reads only valid JSON
    assert [line["event"] for line in lines][-2:] == ["eval", "end"]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert isinstance(losses[0], float) and losses[-2:] == [None, None]
    assert (
        lines[-2]["accuracy"] is None
    )  # argmax() of NaN logits is some class, often the right one
    assert "loss=nan accuracy=nan" in done.out and lines[-2]["images"] == 101


def test_the_oracle_says_the_same_of_a_loss_that_is_no_number(capsys):
    """The gate compares both."""
    oracle.log(SimpleNamespace(log_json=None), "eval", [(2.0, 3, 4), (math.nan, 3, 4)])
    record = json.loads(capsys.readouterr().out)
    assert math.isnan(record["loss"]) and math.isnan(record["accuracy"]) and record["images"] == 8


@pytest.mark.parametrize("act", ["kill one", *full("interrupt", "terminate")])
def test_spawned_processes_end_together(act, tmp_path):
    """SIGKILL for one of them, Ctrl-C, SIGTERM for the script: soon no process is left."""
    log = tmp_path / "log.json"
    job = Forked("mnmc_ddp_mp.py", *short(), "--epochs", 10_000, "--log-json", log)
    launcher, children = psutil.Process(job.process.pid), []
    try:
        wait_for(log, 1, alive=job.process.is_alive)
        children = [p for p in launcher.children() if "spawn_main" in " ".join(p.cmdline())]
        assert len(children) == 2
        if act == "kill one":
            children[1].kill()
        elif act == "terminate":
            launcher.terminate()
        else:
            for process in (launcher, *children):  # as a terminal does
                process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(children, 60)
        done = job.finish(30)
        assert not alive and not done.timed_out and done.code != 0, done
    finally:
        for process in (launcher, *children):
            if process.is_running():
                process.kill()
