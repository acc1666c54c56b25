"""techniques/invariant.py: one training, to the last bit, on 1, 2, 3 and 4 processes."""

from functools import partial

import pytest
import spies
from real import FLAGS, Trained, data, oracle, short, train
from spies import numbers_sent
from support import torchrun, world

SCRIPT = "techniques/invariant.py"
COUNT = 352_042  # the weights of shufflenet_v2_x0_5 with 10 classes
# BatchNorm and dropout, few weights and pixels: a step takes little. Twelve steps.
LONG = [*FLAGS, "--data", data(), "--arch", "mobilenet_v3_small", "--image-size", 16]
LONG += ["--batch-size", 16, "--epochs", 1]


def digests(run: Trained) -> list[tuple]:
    """What a run has logged of each step and each evaluation."""
    kept = [line for line in run.records if line["event"] in ("train", "eval")]
    return [(line["images"], line["loss"], line["accuracy"], line["digest"]) for line in kept]


def trained(size: int, *flags, **keywords) -> list[tuple]:
    """The same, of this many processes."""
    return digests(train(partial(world, size), SCRIPT, *flags, **keywords))


def test_it_is_what_four_data_parallel_processes_compute():
    """By independent code: losses, accuracies, evaluations, weights and BatchNorm's statistics."""
    train(partial(world, 1), SCRIPT, *short()).equals(oracle(4))


@pytest.mark.full
def test_the_number_of_processes_and_their_launcher_do_not_matter():
    """Each digest of 12 steps with dropout: one wrong bit anywhere grows, and would show.

    Once by torchrun itself, and with more than one thread in its environment.
    """
    found = trained(1, *LONG)
    assert len({line[-1] for line in found}) == 12 and len(found) == 12 + 1
    assert trained(4, *LONG) == found
    assert digests(train(partial(torchrun, 2, OMP_NUM_THREADS=2), SCRIPT, *LONG)) == found


@pytest.mark.full
def test_three_processes_with_six_shards():
    """And images of another size than the data's: each shard is resized by itself."""
    flags = [*short(), "--shards", 6, "--batch-size", 48, "--image-size", 24]
    assert trained(3, *flags) == trained(1, *flags)


def test_traffic():
    """In a step a rank has the gradients of S / W shards. It sends others their parts of them, then
    its part of the sum to all others: 4 N (W - 1) / W (S / W + 1) bytes.
    """
    start = partial(world, 2, prepare=spies.sent)
    for out in train(start, SCRIPT, *short(), "--epochs", 1).outs:
        assert numbers_sent(out, "all_to_all_single") == [4 // 2 * COUNT] * 3
        assert numbers_sent(out, "all_gather_into_tensor") == [COUNT] * 3
