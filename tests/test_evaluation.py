"""What is logged is true with any number of processes: each image counts exactly once."""

import re
import time
from itertools import pairwise

import pytest
from real import ARCH
from support import checkpoint, forked, full, records, succeeded, world, write_idx

SIZES = {  # processes: batch size
    1: 32,
    3: 33,  # 101 images: ranks have 34, 34 and 33 of them, in local batches of 11: one batch fewer
    8: 32,  # five images in the last batch: three ranks have none of it
}


def independent(weights, folder) -> tuple[int, float]:
    """The correct predictions and the mean loss of saved weights, from the files in one pass.

    Asserts that the loss would be another if each image had the label of its neighbor.
    """
    import torch
    from torchvision import models

    raw = folder / "FashionMNIST" / "raw"
    pixels = (raw / "t10k-images-idx3-ubyte").read_bytes()[16:]
    labels = torch.tensor(list((raw / "t10k-labels-idx1-ubyte").read_bytes()[8:]))
    images = torch.full((len(labels), 3, 32, 32), -2.0)  # black, after (x - 128) / 64
    gray = torch.tensor(list(pixels)).view(-1, 1, 28, 28).float()
    images[:, :, 2:30, 2:30] = (gray - 128) / 64
    net = models.get_model(ARCH, num_classes=10)
    net.load_state_dict(checkpoint(weights, arch=ARCH))
    with torch.no_grad():
        logits = net.eval()(images)
    loss, wrong = (
        torch.nn.functional.cross_entropy(logits, right).item()
        for right in (labels, labels.roll(1))
    )
    assert wrong != pytest.approx(loss, rel=2e-5)
    return (logits.argmax(1) == labels).sum().item(), loss


@pytest.mark.parametrize("size", [1, 3, *full(8)])
def test_every_image_is_evaluated_once(size, small, tmp_path):
    """The logged counts are those of one pass over the test set with the saved weights."""
    log, weights = tmp_path / "log.json", tmp_path / "weights.pt"
    flags = [*small, "--batch-size", SIZES[size], "--log-json", log, "--save", weights]
    flags += ["--epochs", 1]
    if size == 1:
        succeeded(forked("snsc.py", *flags))
    else:
        succeeded(*world(size, "mnmc_ddp_launch.py", *flags))
    *_, evaluation = records(log, "eval")
    hits, loss = independent(weights, small[3])
    assert evaluation["images"] == 101
    assert round(evaluation["accuracy"] * 101) == hits
    assert evaluation["accuracy"] == pytest.approx(hits / 101, rel=1e-12)
    assert evaluation["loss"] == pytest.approx(loss, rel=2e-6)


def test_training_counts_the_images_of_all_ranks(small, tmp_path):
    """A line every four steps and at the epoch's end. An epoch drops the last 32 of 320 images."""
    log = tmp_path / "log.json"
    flags = [*small, "--batch-size", 48, "--epochs", 1, "--log-every", 4, "--log-json", log]
    succeeded(*world(3, "mnmc_ddp_launch.py", *flags))
    steps = records(log, "train")
    assert [(step["step"], step["images"]) for step in steps] == [(4, 192), (6, 96)]


def test_a_test_set_with_fewer_images_than_processes(tmp_path):
    """Two images for three ranks: one has nothing to evaluate, and the mean is right."""
    log, weights = tmp_path / "log.json", tmp_path / "weights.pt"
    data = write_idx(tmp_path, 60, 2)
    flags = ["--dataset", "fashion-mnist", "--data", data, "--batch-size", 12, "--epochs", 1]
    flags += ["--device", "cpu", "--arch", ARCH, "--log-json", log, "--save", weights]
    succeeded(*world(3, "mnmc_ddp_launch.py", *flags))
    (evaluation,) = records(log, "eval")
    hits, loss = independent(weights, data)
    assert (evaluation["images"], round(evaluation["accuracy"] * 2)) == (2, hits)
    assert evaluation["loss"] == pytest.approx(loss, rel=1e-5)


def slow_steps() -> None:
    """Runs in the script's process: each step takes 0.3 seconds longer."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda *_: time.sleep(0.3))


@pytest.mark.parametrize("size", [1, *full(2)])
def test_seconds_are_those_since_the_last_line(size, small, tmp_path):
    """No more than between the times of the two lines, and all that the steps have taken."""
    log = tmp_path / "log.json"
    flags = [*small, "--log-json", log]
    if size == 1:
        succeeded(forked("snsc.py", *flags, prepare=slow_steps))
    else:
        succeeded(*world(size, "mnmc_ddp_launch.py", *flags, prepare=slow_steps))
    lines = records(log)
    for before, line in pairwise(lines):
        if line["event"] == "train":
            between = line["time"] - before["time"]
            assert 0.3 <= line["seconds"] <= between + 0.05
            assert 0 <= line["data_seconds"] <= line["seconds"]
    parts = sum(line.get("seconds", 0) for line in lines)
    assert 10 * 0.3 < parts <= lines[-1]["time"] - lines[0]["time"]


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


@pytest.mark.full
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
