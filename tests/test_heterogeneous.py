"""techniques/heterogeneous.py: uneven shares of a batch, and the gradient of the whole batch."""

import runpy

import pytest
from real import FLAGS, TEST_IMAGES, numbers, output
from support import ORACLE, ROOT, checkpoint, forked, records, refused, succeeded, world
from test_equality import doubles

SCRIPT = "techniques/heterogeneous.py"
# What torchrun tells the first of two processes: each finds such a mistake by itself.
FIRST = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
SHORT = [*FLAGS[:4], "--max-steps", 3, "--lr", 0.005, "--log-every", 1]


def test_uneven_shares_train_what_the_oracle_trains():
    """Bit for bit: the oracle cuts each batch into parts of these sizes. Two epochs, so that their
    ends and a second order of the images are in it.
    """
    shares = "40,24"
    flags = [*FLAGS, "--shares", shares, *output("uneven")]
    weights = flags[-1].with_suffix(".pt")
    succeeded(*world(2, SCRIPT, *flags, "--save", weights))
    others = [*FLAGS, "--shares", shares, *output("uneven-oracle")]
    exact = others[-1].with_suffix(".pt")
    succeeded(forked(ORACLE, *others, "--save", exact))

    found, right = numbers(flags), numbers(others)
    assert [line[0] for line in found] == [line[0] for line in right] and len(found) == 8
    for (what, loss, accuracy), (_, other, hits) in zip(found, right, strict=True):
        assert accuracy == hits, what
        assert loss == pytest.approx(other, rel=0 if what[0] == "train" else 1e-6, abs=0), what
    assert found[-1][0][3] == TEST_IMAGES
    right = checkpoint(exact)
    assert all(value.equal(right[name]) for name, value in checkpoint(weights).items())
    (start,) = records(flags[-1], "start")
    assert start["local_batches"] == [40, 24] and start["local_batch"] == 40


def without_batchnorm() -> None:
    """In double precision, and BatchNorm normalizes by constants: no image minds the others."""
    import torch

    doubles()
    torch.nn.BatchNorm2d.train = lambda self, mode=True: torch.nn.Module.train(self, False)


WHOLE = [*SHORT, "--batch-size", 12]


@pytest.fixture(scope="module")
def whole() -> list[tuple]:
    """Plain snsc.py with the whole batch."""
    flags = [*WHOLE, *output("uneven-alone")]
    succeeded(forked("snsc.py", *flags, prepare=without_batchnorm))
    return numbers(flags)


@pytest.mark.parametrize("shares", ["9,3", "2,7,3"])
def test_the_mean_is_that_of_the_whole_batch(shares, whole):
    """Where the shares do not matter to BatchNorm they do not matter at all: however the batch is
    cut, plain snsc.py with the whole batch has the same losses.
    """
    ours = [*WHOLE, *output(f"uneven-{shares}")]
    size = shares.count(",") + 1
    succeeded(*world(size, SCRIPT, *ours, "--shares", shares, prepare=without_batchnorm))
    found = numbers(ours)
    assert [line[0] for line in found] == [line[0] for line in whole] and len(found) == 4
    for (what, loss, accuracy), (_, other, hits) in zip(found, whole, strict=True):
        assert loss == pytest.approx(other, rel=1e-12, abs=0) and accuracy == hits, what


def test_a_slow_process_gets_fewer_images():
    """Measured and divided by the script itself. Twenty times is more than noise; and no batch is
    incomplete, nor is the test.
    """
    flags = [*SHORT, "--batch-size", 64, *output("slow")]
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
    """And none is faster with an image moved from one process to another."""
    assert runpy.run_path(str(ROOT / SCRIPT))["divide"](count, speeds) == shares


@pytest.mark.parametrize("shares", ["40,20", "32,16,16", "63,1", "40,24,"])
def test_shares_that_do_not_fit(shares):
    """Another sum, another number of them, one image, no number."""
    flags = output("unfit")
    wrong = ["--batch-size", 64, "--shares", shares]
    refused(forked(SCRIPT, *SHORT, *wrong, *flags, **FIRST), "--shares")
    assert not flags[-1].exists()


@pytest.mark.parametrize(
    "wrong, words", [(["--batch-size", 3], "two images"), (["--slow-rank", 2], "2 processes")]
)
def test_flags_that_do_not_fit_the_processes(wrong, words):
    flags = output("unfit")
    refused(forked(SCRIPT, *SHORT, *wrong, *flags, **FIRST), " ".join(map(str, wrong)), words)
    assert not flags[-1].exists()
