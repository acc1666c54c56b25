"""techniques/syncbn.py: several processes train what one process trains with the whole batch."""

from functools import partial

import spies
import torch
from real import ARCH, doubles, short, train
from spies import numbers_sent, said
from support import forked, world
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


def test_processes_train_what_one_process_trains():
    """snsc.py with the same global batch, in double precision: losses, evaluation, weights, and
    running statistics. These are the same on all ranks, to the last bit, though none is sent.
    """
    flags = [*short(), "--epochs", 1]
    right = train(forked, "snsc.py", *flags, prepare=doubles)
    found = train(partial(world, 2), SCRIPT, *flags, prepare=watched)
    assert len(found.losses) == 3
    found.equals(right, rel=1e-9)
    statistics = [x.sum().item() for name, x in found.weights.items() if "running" in name]
    assert [said(out, "statistics") for out in found.outs] == [[statistics]] * 2

    # Two all-reduces per layer and step, one forward and one backward, of two numbers per channel.
    modules = models.get_model(ARCH, num_classes=10).modules()
    channels = [m.num_features for m in modules if isinstance(m, torch.nn.BatchNorm2d)]
    for out in found.outs:
        numbers = [n for n in numbers_sent(out, "all_reduce") if n > 3]  # 3: the meter's sums
        assert sorted(numbers) == sorted(3 * 2 * [2 * count for count in channels])
