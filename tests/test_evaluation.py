"""What is logged is true, however many processes share the work: each image counts exactly once."""

import math
import os
import re
import time
from types import SimpleNamespace

import pytest
from support import forked, records, succeeded, world, write_idx

SIZES = {  # processes: batch size
    1: 32,
    3: 33,  # 101 images: shares of 34, 34 and 33, and the last one has a batch less
    8: 32,  # five images in the last batch: three processes have none of it
}


def independent(weights, folder) -> tuple[int, float]:
    """Hits and mean loss of saved weights, from the files, in one pass and our own code."""
    import torch
    from torchvision.models import resnet18

    raw = folder / "FashionMNIST" / "raw"
    pixels = (raw / "t10k-images-idx3-ubyte").read_bytes()[16:]
    labels = torch.tensor(list((raw / "t10k-labels-idx1-ubyte").read_bytes()[8:]))
    images = torch.full((len(labels), 3, 32, 32), -2.0)  # black, after (x - 128) / 64
    gray = torch.tensor(list(pixels)).view(-1, 1, 28, 28).float()
    images[:, :, 2:30, 2:30] = (gray - 128) / 64
    net = resnet18(num_classes=10)
    net.load_state_dict(torch.load(weights))
    with torch.no_grad():
        logits = net.eval()(images)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    return (logits.argmax(1) == labels).sum().item(), loss


@pytest.mark.parametrize("size", SIZES)
def test_every_image_is_evaluated_once(size, small, tmp_path):
    """The logged counts are those of one pass over the test set with the saved weights."""
    log, weights = tmp_path / "log.json", tmp_path / "weights.pt"
    flags = [*small, "--batch-size", SIZES[size], "--log-json", log, "--save", weights]
    flags += ["--epochs", 4]
    if size == 1:
        succeeded(forked("snsc.py", *flags))
    else:
        succeeded(*world(size, "mnmc_ddp_launch.py", *flags))
    *_, evaluation = records(log, "eval")
    hits, loss = independent(weights, small[3])
    assert evaluation["images"] == 101
    assert round(evaluation["accuracy"] * 101) == hits
    assert evaluation["accuracy"] == pytest.approx(hits / 101, rel=1e-12)
    assert evaluation["loss"] == pytest.approx(loss, rel=1e-5)
    assert hits > 20  # learnt something: a guess would hide a wrong order of the images


def test_training_counts_every_image_of_every_process(small, tmp_path):
    """The images of a line are those of the global batch, and an epoch drops the remainder."""
    log = tmp_path / "log.json"
    flags = [*small, "--batch-size", 48, "--epochs", 1, "--log-every", 4, "--log-json", log]
    succeeded(*world(3, "mnmc_ddp_launch.py", *flags))
    steps = records(log, "train")
    assert [(step["step"], step["images"]) for step in steps] == [(1, 48), (4, 144), (6, 96)]


def test_a_test_set_with_fewer_images_than_processes(tmp_path):
    """Two images for three processes: one has nothing to evaluate, and the mean is right."""
    log, weights = tmp_path / "log.json", tmp_path / "weights.pt"
    data = write_idx(tmp_path, 60, 2)
    flags = ["--dataset", "fashion-mnist", "--data", data, "--batch-size", 12, "--epochs", 1]
    flags += ["--device", "cpu", "--log-json", log, "--save", weights]
    succeeded(*world(3, "mnmc_ddp_launch.py", *flags))
    (evaluation,) = records(log, "eval")
    hits, loss = independent(weights, data)
    assert (evaluation["images"], round(evaluation["accuracy"] * 2)) == (2, hits)
    assert evaluation["loss"] == pytest.approx(loss, rel=1e-5)


def of_unequal_processes() -> None:
    """Runs in the script's process: the second one waits for its data, and has more memory."""
    import resource

    from torch.utils.data import DataLoader

    rank, batches = int(os.environ.get("RANK", 0)), DataLoader.__iter__

    def late(loader):
        time.sleep(rank)
        return batches(loader)

    DataLoader.__iter__ = late
    resource.getrusage = lambda who: SimpleNamespace(ru_maxrss=2**20 * (3 + rank))


def test_the_slowest_and_the_largest_process_are_logged(small, tmp_path):
    """What process 0 alone would log: no wait, and 3 GiB."""
    log = tmp_path / "log.json"
    flags = [*small, "--epochs", 1, "--log-json", log]
    succeeded(*world(2, "mnmc_ddp_launch.py", *flags, prepare=of_unequal_processes))
    steps, (end,) = (records(log, event) for event in ("train", "end"))
    assert 1 <= steps[0]["data_seconds"] <= steps[0]["seconds"] + 0.1
    assert all(step["data_seconds"] < 0.9 for step in steps[1:])  # since the last line
    assert end["peak_memory_mib"] == 4096


def slow_steps() -> None:
    """Runs in the script's process: each step takes 0.3 seconds longer."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda *_: time.sleep(0.3))


@pytest.mark.parametrize("size", [1, 2])
def test_seconds_are_those_since_the_last_line(size, small, tmp_path):
    """Those of a step's line: less than lies between the times of the two lines."""
    log = tmp_path / "log.json"
    flags = [*small, "--log-json", log]
    if size == 1:
        succeeded(forked("snsc.py", *flags, prepare=slow_steps))
    else:
        succeeded(*world(size, "mnmc_ddp_launch.py", *flags, prepare=slow_steps))
    lines = records(log)
    for k, line in enumerate(lines[:-1]):
        if line["event"] == "train":
            # Process 1 may begin to count before process 0 has written the line before.
            before = lines[max(k - size, 0)]
            between = line["time"] - before["time"] if k >= size else math.inf
            assert 0 <= line["data_seconds"] <= line["seconds"] <= between + 0.05
            assert line["seconds"] >= 0.3
    whole, parts = lines[-1]["seconds"], sum(line.get("seconds", 0) for line in lines[1:-1])
    assert 10 * 0.3 < parts <= whole


def show_masks() -> None:
    """Runs in the script's process: before each dropout, it prints the mask of 64 units."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    def show(module, _):
        if isinstance(module, torch.nn.Dropout) and module.training:
            with torch.random.fork_rng():
                kept = torch.nn.functional.dropout(torch.ones(64)) > 0
            print("mask", "".join("01"[unit] for unit in kept.tolist()))

    register_module_forward_pre_hook(show)


def test_processes_drop_other_units(small, tmp_path):
    """Else both train the same part of the model; and a run can be repeated all the same."""
    masks, logs = [], [tmp_path / "one.json", tmp_path / "again.json"]
    for log in logs:
        flags = [*small, "--arch", "mobilenet_v3_small", "--epochs", 1, "--log-json", log]
        ranks = world(2, "mnmc_ddp_launch.py", *flags, prepare=show_masks)
        succeeded(*ranks)
        masks.append([re.findall("^mask ([01]{64})$", rank.out, flags=re.M) for rank in ranks])
    assert [len(rank) for rank in masks[0]] == [5, 5]
    assert len({mask for rank in masks[0] for mask in rank}) == 10
    assert masks[0] == masks[1]
    losses = [[step["loss"] for step in records(log, "train")] for log in logs]
    assert losses[0] == losses[1]
