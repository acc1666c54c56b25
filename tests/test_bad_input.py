"""Bad input ends in one line that names the flag or variable, exit code 2, and nothing written."""

import os
import resource
import socket
from functools import partial

import pytest
from support import forked, refused, succeeded, world, write_idx

ONE_STEP = ["--max-steps", 1, "--device", "cpu"]


@pytest.mark.parametrize(
    "flags",
    [
        "--arch resnet19",
        "--dataset mnist",
        "--device tpu",
        "--image-size 0",
        "--epochs 0",
        "--epochs five",
        "--max-steps 0",
        "--batch-size 0",
        "--batch-size -256",
        "--lr 0",
        "--lr -0.1",
        "--lr nan",
        "--workers -1",
        "--seed -1",
        "--log-every 0",
        "--log-json nowhere/log.json",
        "--save nowhere/weights.pt",
        "--log-json tests",
        "--save tests",
    ],
)
def test_a_flag_out_of_range(flags):
    refused(forked("snsc.py", *flags.split()), flags.split()[0])


@pytest.mark.parametrize("flags", ["--nnodes 0", "--nproc-per-node 0", "--node-rank -1"])
def test_a_flag_of_the_spawning_script_out_of_range(flags):
    refused(forked("mnmc_ddp_mp.py", *flags.split()), flags.split()[0])


def nobody() -> None:
    """Runs in the script's process: whom root may not lend its rights."""
    if os.getuid() == 0:
        os.setresuid(65534, 0, 0)  # what access() asks for is the real user


@pytest.mark.parametrize("flag", ["--save", "--log-json"])
def test_a_folder_that_may_not_be_written_to(flag, tmp_path):
    tmp_path.chmod(0o555)
    refused(forked("snsc.py", flag, tmp_path / "file", prepare=nobody), flag, "write")


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
    refused(finished, "--device", "process 1 of 2", "--device cpu")


@pytest.mark.parametrize(
    "script, word",
    [
        ("mnmc_ddp_launch.py", "RANK"),
        ("mnmc_ddp_slurm.py", "SLURM_"),
        ("mnmc_apex.py", "apex"),
        ("mnmc_horovod.py", "HOROVOD_RANK"),
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


def test_a_batch_larger_than_the_set(small):
    refused(forked("snsc.py", *small, "--batch-size", 321), "--batch-size 321")
    succeeded(forked("snsc.py", *small, "--batch-size", 320, *ONE_STEP))


@pytest.mark.parametrize("size, test, batch", [(3, 20, 64), (3, 2, 63)], ids=["batch", "test_set"])
def test_processes_that_cannot_share(size, test, batch, tmp_path):
    """A batch that they do not divide, a test set with fewer images: each says the same line."""
    flags = ["--dataset", "fashion-mnist", "--data", write_idx(tmp_path, 100, test), *ONE_STEP]
    log = tmp_path / "log.json"
    flags += ["--batch-size", batch, "--log-json", log]
    ended = world(size, "mnmc_ddp_launch.py", *flags)
    assert len({refused(finished, f"--batch-size {batch}") for finished in ended}) == 1
    assert not log.exists()


def test_a_port_in_use(small):
    """Both processes end, also the one that has found a stranger at the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        flags = [*small, "--nproc-per-node", 2, "--init-method", url]
        refused(forked("mnmc_ddp_mp.py", *flags), f"--init-method {url}", "in use")


def test_several_nodes_that_have_no_meeting_point(small):
    flags = [*small, "--nnodes", 2, "--nproc-per-node", 1]
    refused(forked("mnmc_ddp_mp.py", *flags), "--init-method")


def test_a_full_disk_while_saving(small, tmp_path):
    """The old file stays, whole, nothing is beside it, and no other process fails for it."""
    weights = tmp_path / "weights.pt"
    weights.write_text("old")
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    flags = [*small, *ONE_STEP, "--save", weights]
    first, second = world(2, "mnmc_ddp_launch.py", *flags, prepare=full)
    refused(first, f"--save {weights}", "the old file stays")
    succeeded(second)
    assert not second.err
    assert weights.read_text() == "old" and list(tmp_path.iterdir()) == [weights]
