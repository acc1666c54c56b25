"""techniques/syncbn.py: several processes train what one process trains with the whole batch."""

from functools import partial

import pytest
import spies
import torch
from real import FLAGS, TEST_IMAGES, doubles, train
from spies import numbers_sent, said
from support import forked, full, world
from torchvision import models

SCRIPT = "techniques/syncbn.py"


def watched() -> None:
    """Runs in the script's process, in double precision: tells what it sends, and at its end the
    sum of each of BatchNorm's running statistics on this rank.
    """
    doubles()
    spies.sent()
    wrap, found = torch.nn.parallel.DistributedDataParallel.__init__, []

    def wrapped(self, model, **keywords):
        found.append(model)
        wrap(self, model, **keywords)

    def ended():
        state = found.pop().state_dict()
        spies.tell("statistics", [x.sum().item() for name, x in state.items() if "running" in name])

    torch.nn.parallel.DistributedDataParallel.__init__ = wrapped
    spies.at_the_end(ended)


# Three processes with one image each, too: a BatchNorm for each rank could not train so. With few
# images, BatchNorm amplifies rounding more.
@pytest.mark.parametrize("size, batch, tolerance", [(2, 12, 1e-10), *full((3, 3, 1e-6))])
def test_processes_train_what_one_process_trains(size, batch, tolerance):
    """snsc.py with the same global batch, in double precision: losses, evaluation, weights, and
    running statistics. These are the same on all ranks, to the last bit, though none is sent.
    """
    flags = [*FLAGS, "--epochs", 1, "--batch-size", batch, "--images", 3 * batch, TEST_IMAGES]
    right = train(forked, "snsc.py", *flags, prepare=doubles)
    found = train(partial(world, size), SCRIPT, *flags, prepare=watched)
    assert len(found.losses) == 3
    found.equals(right, rel=tolerance)
    statistics = [x.sum().item() for name, x in found.weights.items() if "running" in name]
    assert [said(out, "statistics") for out in found.outs] == [[statistics]] * size

    # Two all-reduces per layer and step, one forward and one backward, of two numbers per channel.
    modules = models.resnet18(num_classes=10).modules()
    channels = [m.num_features for m in modules if isinstance(m, torch.nn.BatchNorm2d)]
    for out in found.outs:
        numbers = [n for n in numbers_sent(out, "all_reduce") if n > 3]  # 3: the meter's sums
        assert sorted(numbers) == sorted(3 * 2 * [2 * count for count in channels])
