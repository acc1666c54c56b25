"""What is logged is true with any number of processes: each image counts exactly once."""

import time
from functools import partial

import pytest
import torch
from real import ARCH, FLAGS, short, train
from spies import after_each_step, said, tell
from support import forked, world, write_idx
from torchvision.models import get_model


def independent(weights: dict, folder) -> torch.Tensor:
    """Of each test image, in one pass of one process: loss, correct, correct in 5 (images, 3)."""
    raw = folder / "FashionMNIST" / "raw"
    pixels = (raw / "t10k-images-idx3-ubyte").read_bytes()[16:]
    labels = torch.tensor(list((raw / "t10k-labels-idx1-ubyte").read_bytes()[8:]))
    images = torch.full((len(labels), 3, 32, 32), -2.0, dtype=torch.float64)  # black
    images[:, :, 2:30, 2:30] = (torch.tensor([*pixels]).view(-1, 1, 28, 28).double() - 128) / 64
    net = get_model(ARCH, num_classes=10).double()
    net.load_state_dict(weights)
    with torch.no_grad():
        logits = net.eval()(images)
    losses = torch.logsumexp(logits, 1) - logits.gather(1, labels[:, None])[:, 0]
    better = (logits > logits.gather(1, labels[:, None])).sum(1)
    return torch.stack([losses, (better < 1).double(), (better < 5).double()], 1)


# Of 101 images three ranks have 34, 34 and 33, in local batches of 11: the last one has a batch
# fewer. Of two images it has none.
@pytest.mark.parametrize("size, images", [(1, 101), (3, 101), (3, 2)])
def test_every_image_is_evaluated_once(size, images, tmp_path):
    """The logged counts are those of one pass over the test set with the saved weights."""
    data = write_idx(tmp_path, 66, images)
    start, script = (forked, "snsc.py") if size == 1 else (partial(world, 3), "mnmc_ddp_launch.py")
    flags = [*FLAGS, "--data", data, "--arch", ARCH, "--batch-size", 33, "--epochs", 1]
    run = train(start, script, *flags)
    loss, accuracy, _ = independent(run.weights, data).mean(0).tolist()
    (evaluation,) = run.evaluations
    assert evaluation["images"] == images
    assert evaluation["accuracy"] == pytest.approx(accuracy, rel=1e-12)
    assert evaluation["loss"] == pytest.approx(loss, rel=2e-6)


def test_training_counts_the_images_of_all_ranks():
    """A line every two steps and at the epoch's end. An epoch drops the last 12 of 192 images."""
    flags = [*short(), "--batch-size", 60, "--epochs", 1, "--log-every", 2]
    run = train(partial(world, 3), "mnmc_ddp_launch.py", *flags)
    steps = [line for line in run.records if line["event"] == "train"]
    assert [(step["step"], step["images"]) for step in steps] == [(2, 120), (3, 60)]


def slow_steps() -> None:
    """Runs in the script's process: each step takes 0.3 seconds longer."""
    after_each_step(lambda: time.sleep(0.3))


def test_seconds_have_the_whole_step():
    for line in train(forked, "snsc.py", *short(), "--epochs", 1, prepare=slow_steps).records:
        if line["event"] == "train":
            assert line["seconds"] >= 0.3 and 0 <= line["data_seconds"] <= line["seconds"]


def show_masks() -> None:
    """Runs in the script's process: before each dropout, it tells the mask of 64 units."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    def show(module, _):
        if isinstance(module, torch.nn.Dropout) and module.training:
            with torch.random.fork_rng():
                tell("mask", torch.nn.functional.dropout(torch.ones(64)).tolist())

    register_module_forward_pre_hook(show)


@pytest.mark.full
def test_processes_drop_other_units():
    """Else both train the same part of the model; and a run can be repeated all the same."""
    start = partial(world, 2, prepare=show_masks)
    flags = [*short(), "--arch", "mobilenet_v3_small", "--epochs", 1]
    one, again = (train(start, "mnmc_ddp_launch.py", *flags) for _ in range(2))
    masks = [said(out, "mask") for out in one.outs]
    assert [len(rank) for rank in masks] == [3, 3]
    assert len({tuple(mask) for rank in masks for mask in rank}) == 6
    assert masks == [said(out, "mask") for out in again.outs] and one.losses == again.losses
