"""Bad input ends in one line that names the flag or variable, exit code 2, and nothing written."""

import ctypes
import os
import resource
import signal
import socket
import struct
from functools import partial
from pathlib import Path

import psutil
import pytest
from support import (
    Forked,
    forked,
    records,
    refused,
    succeeded,
    wait_for,
    world,
    write_idx,
    write_photos,
)

ONE_STEP = ["--max-steps", 1, "--device", "cpu"]


@pytest.mark.parametrize(
    "flags",
    [
        "--arch resnet19",
        "--arch googlenet",  # in training it gives more than logits
        "--arch inception_v3",
        "--arch fcn_resnet50",  # not a classifier
        "--dataset mnist",
        "--device tpu",
        "--image-size 0",
        "--image-size 32 --arch alexnet",  # nothing is left of it in the middle
        "--image-size 32 --arch vit_b_16",  # for images of 224 pixels alone
        "--epochs 0",
        "--epochs five",
        "--max-steps 0",
        "--batch-size 0",
        "--batch-size 1",  # of one image BatchNorm knows no variance
        "--batch-size -256",
        "--lr 0",
        "--lr -0.1",
        "--lr nan",
        "--lr inf",
        "--workers -1",
        "--seed -1",
        f"--seed {2**63}",
        f"--seed {2**64}",
        f"--seed {10**30}",
        "--log-every 0",
        "--log-json nowhere/log.json",
        "--save nowhere/weights.pt",
        "--log-json tests",
        "--save tests",
    ],
)
def test_a_flag_out_of_range(flags):
    line = refused(forked("snsc.py", *flags.split()), *flags.split()[:2])
    assert len(line) < 200  # not the names of 80 models


@pytest.mark.parametrize("flags", ["--nnodes 0", "--nproc-per-node 0", "--node-rank -1"])
def test_a_flag_of_the_spawning_script_out_of_range(flags):
    refused(forked("mnmc_ddp_mp.py", *flags.split()), flags.split()[0])


def nobody() -> None:
    """Runs in the script's process: root goes without its powers, and is as bound as any user."""
    none = struct.pack("6I", *[0] * 6)  # no capabilities
    version_3 = struct.pack("Ii", 0x20080522, 0)
    assert ctypes.CDLL(None).capset(version_3, none) == 0


@pytest.mark.parametrize("flag", ["--save", "--log-json"])
@pytest.mark.parametrize("closed", ["folder", "file"])
def test_a_place_that_may_not_be_written_to(flag, closed, tmp_path):
    """A file in a folder that is closed; a file that is there, and closed itself."""
    file = tmp_path / "file"
    if closed == "file":
        file.write_text("old")
        file.chmod(0o444)
    else:
        tmp_path.chmod(0o555)
    done = forked("snsc.py", flag, file, *ONE_STEP, "--dataset", "fashion-mnist", prepare=nobody)
    refused(done, f"{flag}: {file}", "write")
    assert not file.exists() or file.read_text() == "old"


def without_cuda() -> None:
    import torch

    torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0


@pytest.mark.parametrize("script", ["snsc.py", "snmc_dp.py", "mnmc_ddp_launch.py"])
def test_device_cuda_without_cuda(script):
    finished = forked(script, "--device", "cuda", prepare=without_cuda, **alone())
    refused(finished, "--device", "--device cpu")


def one_gpu() -> None:
    import torch

    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1


def alone(local_rank: int = 0) -> dict:
    """What torchrun tells one of two processes on a node."""
    names = dict.fromkeys(("RANK", "LOCAL_RANK"), local_rank)
    return names | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), 2)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_processes_than_gpus(device):
    """The second of two processes says so, before it waits for the first."""
    finished = forked("mnmc_ddp_launch.py", "--device", device, prepare=one_gpu, **alone(1))
    refused(finished, "--device", "no GPU for process 1", "--device cpu")


@pytest.mark.parametrize(
    "script, word",
    [
        ("mnmc_ddp_launch.py", "RANK"),
        ("mnmc_ddp_slurm.py", "SLURM_"),
        ("mnmc_apex.py", "apex"),
        ("mnmc_horovod.py", "HOROVOD_RANK"),
        ("techniques/activation_checkpointing.py", "RANK"),
        ("techniques/amp.py", "RANK"),
        ("techniques/channels_last.py", "RANK"),
        ("techniques/collectives.py", "LOCAL_RANK"),
        ("techniques/comm_hooks.py", "RANK"),
        ("techniques/compile.py", "RANK"),
        ("techniques/local_sgd.py", "RANK"),
        ("techniques/ring_allreduce.py", "RANK"),
        ("techniques/syncbn.py", "RANK"),
        ("techniques/custom_optimizer.py", "RANK"),
        ("techniques/heterogeneous.py", "RANK"),
        ("techniques/no_sync.py", "RANK"),
        ("techniques/distributed_eval.py", "RANK"),
        ("techniques/uneven_inputs.py", "RANK"),
        ("techniques/fsdp.py", "RANK"),
        ("techniques/zero1.py", "RANK"),
    ],
)
def test_started_without_its_launcher(script, word):
    refused(forked(script), word)


@pytest.mark.parametrize("missing", alone())
def test_one_variable_of_the_launcher_is_missing(missing):
    env = alone()
    del env[missing]
    refused(forked("mnmc_ddp_launch.py", **env), missing, "torchrun")


@pytest.mark.parametrize("dataset", ["fashion-mnist", "imagenet"])
@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_a_data_folder_without_data(dataset, folder, tmp_path):
    """For a set that is not downloaded; test_data.py has CIFAR-10."""
    (tmp_path / "empty").mkdir()
    log = tmp_path / "log.json"
    flags = ["--dataset", dataset, "--data", tmp_path / folder, *ONE_STEP, "--log-json", log]
    refused(forked("snsc.py", *flags), f"--data {tmp_path / folder}", dataset)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_a_data_file_cut_short(tmp_path):
    write_idx(tmp_path, 60, 20)
    os.truncate(tmp_path / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte", 5000)
    flags = ["--dataset", "fashion-mnist", "--data", tmp_path, *ONE_STEP]
    refused(forked("snsc.py", *flags), f"--data {tmp_path}", "fashion-mnist")


def test_a_class_folder_without_images(photos, tmp_path):
    (tmp_path / "train" / "ant").mkdir(parents=True)
    refused(forked("snsc.py", *photos, "--data", tmp_path), f"--data {tmp_path}", "imagenet")


@pytest.mark.parametrize("part", ["train", "val"])
def test_train_and_val_with_other_class_folders(part, photos, tmp_path):
    """The numbers of the classes would not be the same; one missing, or one named otherwise."""
    write_photos(tmp_path)
    if part == "train":
        (tmp_path / "train" / "bee").rename(tmp_path / "train" / "dog")
    else:
        (tmp_path / "val" / "cat").rename(tmp_path / "cat")
    done = forked("snsc.py", *photos, "--data", tmp_path)
    refused(done, f"--data {tmp_path}", "train/", "val/", "class folders")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.parametrize("damage", ["cut short", "empty", "text"])
def test_a_damaged_photograph(damage, part, workers, photos, tmp_path):
    """It is named, also where a process of the loader has read it."""
    photo = write_photos(tmp_path) / part / "bee" / "2.jpg"
    content = {"cut short": photo.read_bytes()[:200], "empty": b"", "text": b"no photograph"}
    photo.write_bytes(content[damage])
    flags = [*photos, "--data", tmp_path, "--workers", workers, "--epochs", 1]
    refused(forked("snsc.py", *flags), str(photo))


def test_a_damaged_photograph_of_one_process(photos, tmp_path):
    """Who reads it names it; the other one does not wait for ever."""
    photo = write_photos(tmp_path) / "val" / "bee" / "2.jpg"
    photo.write_bytes(b"")
    flags = [*photos, "--data", tmp_path, "--workers", 2, "--epochs", 1]
    first, second = sorted(world(2, "mnmc_ddp_launch.py", *flags), key=lambda one: -one.code)
    refused(first, str(photo))
    assert second.code == 1 and not second.timed_out and second.seconds < 60


def test_a_batch_larger_than_the_set(small):
    refused(forked("snsc.py", *small, "--batch-size", 321), "--batch-size 321")
    succeeded(forked("snsc.py", *small, "--batch-size", 320, *ONE_STEP))


def all_have_met() -> None:
    """Runs in the script's process: the first one to end could take the group from the others."""
    import torch.distributed as dist

    begin = dist.init_process_group

    def init_process_group(backend):
        begin(backend)
        dist.barrier()

    dist.init_process_group = init_process_group


@pytest.mark.parametrize("size, batch", [(3, 64), (2, 2), (3, 3), (2, 102)])
def test_processes_that_cannot_share(size, batch, tmp_path):
    """A batch that they do not divide, one image for each, more than there are: the same line."""
    flags = ["--dataset", "fashion-mnist", "--data", write_idx(tmp_path, 100, 20), *ONE_STEP]
    log = tmp_path / "log.json"
    flags += ["--batch-size", batch, "--log-json", log]
    ended = world(size, "mnmc_ddp_launch.py", *flags, prepare=all_have_met)
    assert len({refused(finished, f"--batch-size {batch}") for finished in ended}) == 1
    assert not log.exists()


def test_two_images_for_each_process_are_enough(tmp_path):
    """The least batch that is not refused is trained."""
    log = tmp_path / "log.json"
    flags = ["--dataset", "fashion-mnist", "--data", write_idx(tmp_path, 100, 20), *ONE_STEP]
    succeeded(*world(2, "mnmc_ddp_launch.py", *flags, "--batch-size", 4, "--log-json", log))
    assert records(log, "train")[0]["images"] == 4


def test_a_loss_that_is_no_number_is_null_in_the_log(small, tmp_path):
    """JSON has no nan: what reads the log reads every line, and sees that training went astray."""
    log = tmp_path / "log.json"
    flags = [*small, "--epochs", 1, "--lr", 1e9, "--log-json", log]
    done = forked("snsc.py", *flags)
    succeeded(done)
    lines = records(log)  # which reads nothing but JSON
    assert [line["event"] for line in lines] == ["start", *["train"] * 5, "eval", "end"]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert isinstance(losses[0], float) and losses[-2:] == [None, None]
    assert "loss=nan" in done.out  # people are told in its own word
    assert lines[-2]["images"] == 101 and 0 <= lines[-2]["accuracy"] <= 1


@pytest.fixture
def scratch(tmp_path) -> dict:
    """The variable that gives a program an empty temporary folder of its own."""
    (tmp_path / "tmp").mkdir()
    return {"TMPDIR": tmp_path / "tmp"}


def left(scratch: dict) -> list[str]:
    """What is in that folder, the cache apart that torchvision makes when it is imported."""
    found = [path.name for path in Path(scratch["TMPDIR"]).rglob("*")]
    return [name for name in found if not name.startswith("torchinductor_")]


def spawning(small, *flags, **env) -> Forked:
    return Forked("mnmc_ddp_mp.py", *small, "--nproc-per-node", 2, *flags, **env)


@pytest.mark.parametrize("flags", [[], ["--batch-size", 63], ["--lr", 0]], ids=str)
def test_spawned_processes_leave_no_file(flags, small, scratch):
    """Not when they have done their work, nor when they are refused, by each or by the first."""
    done = spawning(small, *ONE_STEP, *flags, **scratch).finish()
    if flags:
        refused(done, flags[0])
    else:
        succeeded(done)
    assert not left(scratch)


@pytest.mark.parametrize("act", ["kill one", "interrupt", "terminate"])
def test_spawned_processes_that_are_cut_short_leave_no_file(act, small, scratch, tmp_path):
    """SIGKILL of one of them, Ctrl-C, SIGTERM: soon no process is left, and no file."""
    log = tmp_path / "log.json"
    job = spawning(small, "--epochs", 10_000, "--log-json", log, **scratch)
    launcher, children = psutil.Process(job.process.pid), []
    try:
        wait_for(log, 1, alive=job.process.is_alive)
        children = [p for p in launcher.children() if "spawn_main" in " ".join(p.cmdline())]
        assert len(children) == 2 and left(scratch)
        if act == "kill one":
            children[1].kill()
        elif act == "terminate":
            launcher.terminate()
        else:
            for process in (launcher, *children):  # a terminal sends it to all of them
                process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(children, 30)
        done = job.finish(30)
        assert not alive and not done.timed_out and done.code != 0, done
        assert not left(scratch)
    finally:
        for process in (launcher, *children):
            if process.is_running():
                process.kill()


def test_a_port_in_use(small):
    """Both processes end, also the one that has found a stranger at the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        flags = [*small, "--nproc-per-node", 2, "--init-method", url]
        refused(forked("mnmc_ddp_mp.py", *flags), f"--init-method {url}", "in use")


@pytest.mark.parametrize("url", ["tcp://127.0.0.1", "nowhere"])
def test_a_meeting_point_that_is_none(url, small):
    flags = [*small, "--nproc-per-node", 2, "--init-method", url]
    refused(forked("mnmc_ddp_mp.py", *flags), f"--init-method {url}")


def test_several_nodes_that_have_no_meeting_point(small):
    flags = [*small, "--nnodes", 2, "--nproc-per-node", 1]
    refused(forked("mnmc_ddp_mp.py", *flags), "--init-method")


def test_a_full_disk_while_saving(small, tmp_path):
    """The old file stays, whole, and nothing is beside it. The other process ends as well: it does
    not wait for ever for one that has gone.
    """
    weights = tmp_path / "weights.pt"
    weights.write_text("old")
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    flags = [*small, *ONE_STEP, "--save", weights]
    first, second = world(2, "mnmc_ddp_launch.py", *flags, prepare=full)
    refused(first, str(weights), "not written", "stays")
    assert second.code == 1 and not second.timed_out and second.seconds < 60
    assert weights.read_text() == "old" and list(tmp_path.iterdir()) == [weights]
