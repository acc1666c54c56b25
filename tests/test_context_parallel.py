"""techniques/context_parallel.py: ranks with parts of each image train what one process trains."""

from functools import cache, partial

import pytest
import spies
from real import FLAGS, TEST_IMAGES, Trained, data, doubles, train
from spies import numbers_sent
from support import ORACLE, forked, full, world

SCRIPT = "techniques/context_parallel.py"
LAYERS, TOKENS, WIDTH = 4, 65, 128  # of vit_tiny
BATCH, STEPS = 12, 6  # 3 in each of 2 epochs
VIT = [*FLAGS, "--arch", "vit_tiny", "--lr", 0.05, "--batch-size", BATCH]
VIT += ["--images", 3 * BATCH, TEST_IMAGES]


def watched() -> None:
    doubles()
    spies.sent()


@cache
def exact() -> Trained:
    return train(forked, ORACLE, *VIT, "--data", data(), prepare=doubles)


@pytest.mark.parametrize("size", [2, *full(3)])
def test_ranks_train_what_one_process_trains(size):
    """In double precision, and with 65 tokens: the first ranks may have one more than the others.

    In a layer a rank sends W - 1 pairs of keys and values forward, W - 1 backward, and W gradients
    of such pairs: together 3 W - 2.
    """
    found = train(partial(world, size, prepare=watched), SCRIPT, *VIT, "--data", data())
    assert len(found.losses) == STEPS and abs(found.losses[-1] - found.losses[0]) > 1e-3
    found.equals(exact(), rel=1e-12)

    def isends(mode: str) -> list[list[int]]:
        return [numbers_sent(out, "isend", mode) for out in found.outs]

    pairs = (3 * size - 2) * LAYERS * STEPS
    assert [len(rank) for rank in isends("train")] == [pairs] * size
    batches = -(-TEST_IMAGES // BATCH)  # evaluated after each epoch
    assert [len(rank) for rank in isends("eval")] == [(size - 1) * LAYERS * 2 * batches] * size
    # All ranks together send every token's key and value as often as a rank sends a pair.
    assert sum(map(sum, isends("train"))) == pairs * 2 * BATCH * TOKENS * WIDTH
