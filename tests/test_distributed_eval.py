"""techniques/distributed_eval.py: the exact numbers, and two that look like them."""

from functools import partial

import pytest
import torch
from real import ARCH, FLAGS, TEST_IMAGES, data, doubles, train
from support import succeeded, world, write_idx
from test_evaluation import independent

SCRIPT = "techniques/distributed_eval.py"
SMALL = [*FLAGS, "--arch", ARCH, "--epochs", 1, "--log-every", 50]
COUNTED = ("loss", "accuracy", "top5")


def near(record: dict, means) -> None:
    """The numbers of a line, to twelve digits."""
    found = [record[name] for name in COUNTED]
    assert found == pytest.approx(means.tolist(), rel=1e-12), record["event"]


def test_equal_to_one_process_and_the_errors_are_those_described():
    """101 images: with three ranks one comes twice, and shares of 34, 34 and 33 images have
    batches of 16, 16 and 2 or 1.
    """
    size, local = 3, 16
    flags = [*SMALL, "--batch-size", size * local, "--data", data()]
    run = train(partial(world, size, prepare=doubles), SCRIPT, *flags)
    each = independent(run.weights, data())
    exact, padded, averaged = run.records[-4:-1]
    assert [exact["event"], padded["event"], averaged["event"]] == ["eval", "padded", "averaged"]
    near(exact, each.mean(0))
    assert exact["images"] == TEST_IMAGES
    assert exact["accuracy"] * TEST_IMAGES == pytest.approx(each[:, 1].sum().item(), abs=1e-9)
    near(padded, torch.cat([each, each[:1]]).mean(0))
    assert padded["images"] == TEST_IMAGES + 1
    shares = [torch.stack([x.mean(0) for x in each[r::size].split(local)]) for r in range(size)]
    near(averaged, torch.stack([share.mean(0) for share in shares]).mean(0))
    assert averaged["loss"] != pytest.approx(exact["loss"], rel=1e-4)
    assert padded["loss"] != pytest.approx(exact["loss"], rel=1e-6)


def test_fewer_images_than_ranks(tmp_path):
    """Two images for three ranks: the exact numbers are right, and no mean of means exists."""
    weights = tmp_path / "weights.pt"
    flags = [*SMALL, "--batch-size", 12, "--data", write_idx(tmp_path, 24, 2), "--save", weights]
    ranks = world(3, SCRIPT, *flags, prepare=doubles)
    succeeded(*ranks)
    lines = [line.split() for line in ranks[0].out.splitlines()]
    found = {line[0]: dict(word.split("=") for word in line[1:]) for line in lines}
    each = independent(torch.load(weights)["model"], tmp_path)
    exact = [float(found["eval"][name]) for name in COUNTED]
    assert exact == pytest.approx(each.mean(0).tolist(), rel=1e-8)  # of 9 digits
    assert (found["eval"]["images"], found["padded"]["images"]) == ("2", "3")
    assert [found["averaged"][name] for name in COUNTED] == ["nan"] * 3
