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
    records,
    refused,
    succeeded,
    wait_for,
    world,
    write_photos,
)

from bench import oracle

DDP, PIPELINES = "mnmc_ddp_launch.py", ("pipeline", "pipeline_by_hand")
PLATFORM = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("script", "launcher", "lacks"),
    [
        (DDP, "torchrun", [*PLATFORM]),
        (DDP, "torchrun", ["RANK"]),
        (DDP, "torchrun", ["WORLD_SIZE"]),
        ("mnmc_ddp_slurm.py", "srun", [*PLATFORM]),
    ],
)
def test_started_without_its_launcher(script, launcher, lacks):
    """Or one variable is missing. If it is the address, PyTorch says so."""
    found = {name: value for name, value in PLATFORM.items() if name not in lacks}
    line = refused(forked(script, **found), f"start this script with {launcher}")
    assert len(line) < 100


VIT = "--arch vit_tiny --images 24 8 --batch-size 12"
NO_VIT = "--arch resnet18: give a vision transformer"
PARALLEL = [("context_parallel", ""), ("tensor_parallel", ""), ("tensor_parallel_by_hand", "")]
PARALLEL += [("parallel_2d", " --tensor-parallel 1")]
# A technique or a script of the ladder, how many processes, its flags, and words of the line.
REFUSED = [
    ("snsc.py", 1, "--batch-size 194", "--batch-size 194: there are 192 training images"),
    (DDP, 2, "--batch-size 194", "--batch-size 194: there are 192 training images"),
    (DDP, 3, "", "--batch-size 64: must be a multiple of 3"),
    (DDP, 2, "--batch-size 1", "--batch-size 1: must be a multiple of 2"),
    ("activation_checkpointing", 1, "--arch vgg11", "--arch vgg11: it has no repeated blocks"),
    ("grad_accum", 1, "--accum-steps 3", "--accum-steps"),  # else a wrong mean, and no error
    ("no_sync", 1, "--accum-steps 3", "--accum-steps"),
    ("heterogeneous", 2, "--shares 40,20", "--shares: must be 2 numbers with the sum 64"),
    ("heterogeneous", 2, "--shares 32,16,16", "--shares: must be 2 numbers with the sum 64"),
    ("invariant", 3, "", "--shards 4: must be a multiple of 3"),
    ("invariant", 1, "--shards 5", "--shards 5"),
    ("parameter_server", 1, "", "--nproc-per-node"),
    *((name, 1, "--micro-batches 3", "--batch-size 64: ") for name in PIPELINES),
    *((name, 1, "--arch densenet121", "--arch: the layers of DenseNet") for name in PIPELINES),
    ("uneven_inputs", 2, "--extra-images 129", "--batch-size 64: there are 63 training images"),
    *((name, 1, f"--arch resnet18{more}", NO_VIT) for name, more in PARALLEL),
    ("tensor_parallel_by_hand", 3, VIT, "--nproc-per-node: 3 processes cannot split 4 heads"),
    ("parallel_2d", 2, f"{VIT} --tensor-parallel 3", "--tensor-parallel 3: must divide 2"),
    ("parallel_3d", 2, VIT, "--pipeline-parallel x --tensor-parallel: 4 must divide 2"),
]


@pytest.mark.parametrize(("script", "size", "flags", "line"), REFUSED)
def test_flags_that_do_not_fit(script, size, flags, line):
    """All ranks say so and end."""
    path = script if script.endswith(".py") else f"techniques/{script}.py"
    for done in world(size, path, *short(), *flags.split()):
        refused(done, line)


def test_a_batch_that_is_the_whole_set_is_trained():
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


def test_hidden_folders_are_no_classes(photos, tmp_path):
    """Jupyter's .ipynb_checkpoints counted as a class."""
    tree = write_photos(tmp_path / "photos", 2)
    for folder in (tree / "train", tree / "val"):
        shutil.copytree(folder / "ant", folder / ".ipynb_checkpoints")
    done = forked("snsc.py", *photos, "--data", tree)
    refused(done, "train/ and val/ need equal class folders, no hidden ones")


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


@pytest.mark.parametrize(
    "script", ["hybrid_fsdp.py", pytest.param("fabric_ddp.py", marks=pytest.mark.full)]
)
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
    # argmax() of NaN logits is some class, often the right one.
    assert lines[-2]["accuracy"] is None
    assert "loss=nan accuracy=nan" in done.out and lines[-2]["images"] == 101


def test_the_oracle_says_the_same_of_a_loss_that_is_no_number(capsys):
    """The gate compares both."""
    oracle.log(SimpleNamespace(log_json=None), "eval", [(2.0, 3, 4), (math.nan, 3, 4)])
    record = json.loads(capsys.readouterr().out)
    assert math.isnan(record["loss"]) and math.isnan(record["accuracy"]) and record["images"] == 8


@pytest.mark.full
@pytest.mark.parametrize("act", ["kill one", "interrupt", "terminate"])
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
