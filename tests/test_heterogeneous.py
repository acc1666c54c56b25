"""techniques/heterogeneous.py: uneven shares of a batch, and the gradient of the whole batch."""

import runpy
from functools import partial

import pytest
from real import TEST_IMAGES, doubles, short, train
from support import ORACLE, ROOT, forked, world

SCRIPT = "techniques/heterogeneous.py"


def test_uneven_shares_train_what_the_oracle_trains():
    """Bit for bit: the oracle cuts each batch into parts of these sizes. Two epochs, so that their
    ends and a second order of the images are in it.
    """
    flags = [*short(), "--shares", "40,24"]
    run = train(partial(world, 2), SCRIPT, *flags)
    run.equals(train(forked, ORACLE, *flags))
    assert len(run.losses) == 6 and run.records[0]["local_batches"] == [40, 24]


def without_batchnorm() -> None:
    """In double precision, and BatchNorm normalizes by constants: no image changes another's."""
    import torch

    doubles()
    torch.nn.BatchNorm2d.train = lambda self, mode=True: torch.nn.Module.train(self, False)


def test_the_mean_is_that_of_the_whole_batch():
    """If the shares do not matter to BatchNorm, they do not matter at all: however the batch is
    cut, snsc.py has the same losses.
    """
    flags = [*short(), "--batch-size", 12, "--images", 36, TEST_IMAGES, "--epochs", 1]
    run = train(partial(world, 3), SCRIPT, *flags, "--shares", "2,7,3", prepare=without_batchnorm)
    run.equals(train(forked, "snsc.py", *flags, prepare=without_batchnorm), rel=1e-12)


def test_a_slow_rank_gets_fewer_images():
    """Measured and divided by the script itself: a factor of 20 is more than noise. No batch is
    incomplete, nor is the test.
    """
    flags = [*short(), "--epochs", 1, "--slow-rank", 0, "--slow-factor", 20]
    run = train(partial(world, 2), SCRIPT, *flags)
    slow, other = run.records[0]["local_batches"]
    assert slow + other == 64 and 2 <= slow < other
    assert [line["images"] for line in run.records[1:-1]] == [64, 64, 64, TEST_IMAGES]


@pytest.mark.parametrize(
    "count, speeds, shares",
    [
        (64, [1, 1], [32, 32]),
        (64, [2, 1], [43, 21]),
        (64, [5, 3], [40, 24]),
        (7, [1, 1, 1], [3, 2, 2]),
        (64, [1000, 1], [62, 2]),  # BatchNorm needs two
        (4, [1, 9], [2, 2]),
    ],
)
def test_shares_are_in_proportion_to_speed(count, speeds, shares):
    """And none is faster with an image moved from one rank to another."""
    assert runpy.run_path(str(ROOT / SCRIPT))["divide"](count, speeds) == shares
