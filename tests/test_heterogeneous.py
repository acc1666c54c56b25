"""techniques/heterogeneous.py: uneven shares of a batch, and the gradient of the whole batch."""

import runpy

import pytest
from real import FLAGS, TEST_IMAGES, compare, doubles, numbers, output
from support import ORACLE, ROOT, checkpoint, forked, records, refused, succeeded, world

SCRIPT = "techniques/heterogeneous.py"
ARCH = "shufflenet_v2_x0_5"
SMALL = [*FLAGS, "--arch", ARCH]


def test_uneven_shares_train_what_the_oracle_trains():
    """Bit for bit: the oracle cuts each batch into parts of these sizes. Two epochs, so that their
    ends and a second order of the images are in it.
    """
    flags = [*SMALL, "--shares", "40,24"]
    ours, others = ([*flags, *output(name)] for name in ("shares", "shares-oracle"))
    weights, exact = (log.with_suffix(".pt") for log in (ours[-1], others[-1]))
    succeeded(*world(2, SCRIPT, *ours, "--save", weights))
    succeeded(forked(ORACLE, *others, "--save", exact))
    compare(numbers(ours), numbers(others), 0)
    assert len(numbers(ours)) == 8
    right = checkpoint(exact, arch=ARCH)
    assert all(value.equal(right[name]) for name, value in checkpoint(weights, arch=ARCH).items())
    (start,) = records(ours[-1], "start")
    assert start["local_batches"] == [40, 24]


def without_batchnorm() -> None:
    """In double precision, and BatchNorm normalizes by constants: no image changes another's."""
    import torch

    doubles()
    torch.nn.BatchNorm2d.train = lambda self, mode=True: torch.nn.Module.train(self, False)


WHOLE = [*SMALL, "--batch-size", 12, "--max-steps", 3]


@pytest.fixture(scope="module")
def whole() -> list[tuple]:
    """Plain snsc.py with the whole batch."""
    flags = [*WHOLE, *output("shares-whole")]
    succeeded(forked("snsc.py", *flags, prepare=without_batchnorm))
    return numbers(flags)


@pytest.mark.parametrize("shares", ["9,3", "2,7,3"])
def test_the_mean_is_that_of_the_whole_batch(shares, whole):
    """If the shares do not matter to BatchNorm, they do not matter at all: however the batch is
    cut, snsc.py has the same losses.
    """
    flags = [*WHOLE, *output(f"shares-{shares}"), "--shares", shares]
    succeeded(*world(shares.count(",") + 1, SCRIPT, *flags, prepare=without_batchnorm))
    found = numbers(flags)
    assert [line[0] for line in found] == [line[0] for line in whole] and len(found) == 3
    for (what, loss, accuracy), (_, other, hits) in zip(found, whole, strict=True):
        assert loss == pytest.approx(other, rel=1e-12, abs=0) and accuracy == hits, what


def test_a_slow_rank_gets_fewer_images():
    """Measured and divided by the script itself: a factor of 20 is more than noise. No batch is
    incomplete, nor is the test.
    """
    flags = [*SMALL, "--epochs", 1, *output("shares-slow")]
    succeeded(*world(2, SCRIPT, *flags, "--slow-rank", 0, "--slow-factor", 20))
    (start,) = records(flags[-1], "start")
    slow, other = start["local_batches"]
    assert slow + other == 64 and 2 <= slow < other
    assert [line[0][3] for line in numbers(flags)] == [64, 64, 64, TEST_IMAGES]


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


@pytest.mark.parametrize("shares", ["40,20", "32,16,16"])
def test_shares_that_do_not_fit(shares):
    """Another sum, another number of them."""
    for rank in world(2, SCRIPT, *SMALL, "--shares", shares):
        refused(rank, "--shares", "2 numbers", "64")
