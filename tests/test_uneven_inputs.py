"""techniques/uneven_inputs.py: some ranks have fewer batches, and every image counts the same."""

from functools import partial

import pytest
import spies
from real import doubles, short, train
from spies import numbers_sent
from support import ORACLE, forked, world

SCRIPT = "techniques/uneven_inputs.py"


def images(run) -> list[int]:
    """Those of each step and evaluation."""
    return [line["images"] for line in run.records if line["event"] in ("train", "eval")]


def test_two_processes_train_what_the_oracle_trains():
    """Bit for bit: two steps of both, two of rank 0 only, and once more.

    The second epoch shows that all go on with the same weights and the same momentum. Each step
    asks three times who is still there, and the end of an epoch twice.
    """
    flags = [*short(), "--extra-images", 64]
    found = train(partial(world, 2, prepare=spies.sent), SCRIPT, *flags)
    found.equals(train(forked, ORACLE, *flags, "--parts", 2))
    assert images(found) == 2 * [64, 64, 32, 32, 101]
    assert numbers_sent(found.out, "all_reduce").count(1) == 2 * (4 * 3 + 2)


@pytest.mark.full
def test_three_processes_with_partial_batches():
    """98, 47 and 47 images in batches of 20: in the third step 20, 7 and 7 of them, then 20.

    In double precision: 20 / 34 is rounded.
    """
    flags = [*short(), "--batch-size", 60, "--extra-images", 50, "--epochs", 1]
    found = train(partial(world, 3), SCRIPT, *flags, prepare=doubles)
    found.equals(train(forked, ORACLE, *flags, "--parts", 3, prepare=doubles), rel=1e-9)
    assert images(found) == [60, 60, 34, 20, 18, 101]
