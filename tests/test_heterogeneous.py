"""techniques/heterogeneous.py: uneven shares of a batch, and the gradient of the whole batch."""

import runpy
from functools import partial

import pytest
from real import TEST_IMAGES, short, train
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
        (64, [2, 1], [43, 21]),
        (64, [5, 3], [40, 24]),
        (7, [1, 1, 1], [3, 2, 2]),
        (64, [1000, 1], [62, 2]),  # BatchNorm needs two
    ],
)
def test_shares_are_in_proportion_to_speed(count, speeds, shares):
    """And none is faster with an image moved from one rank to another."""
    assert runpy.run_path(str(ROOT / SCRIPT))["divide"](count, speeds) == shares
