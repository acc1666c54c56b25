"""What a script refuses by itself, in one line; and what happens when one of its processes ends."""

import signal

import psutil
import pytest
from real import short
from support import (
    Forked,
    forked,
    full,
    records,
    refused,
    succeeded,
    wait_for,
    world,
    write_photos,
)


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
