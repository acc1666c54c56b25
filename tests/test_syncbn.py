"""techniques/syncbn.py: several processes train what one process trains with the whole batch."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from real import FLAGS, TEST_IMAGES, doubles, train
from support import forked, world
from torchvision import models

SCRIPT = "techniques/syncbn.py"


def watched() -> None:
    """Runs in the script's process, in double precision: at its end, it saves this rank's model,
    and the sizes of what SyncBatchNorm has all-reduced.
    """
    import torch.distributed as dist

    doubles()
    end, all_reduce = dist.destroy_process_group, dist.all_reduce
    wrap = torch.nn.parallel.DistributedDataParallel.__init__
    found, sent = [], []

    def wrapped(self, model, **keywords):
        found.append(model)
        wrap(self, model, **keywords)

    def counted(tensor, *arguments):
        if tensor.ndim == 2:  # means of the numbers, and of their squares
            sent.append(tensor.numel())
        return all_reduce(tensor, *arguments)

    def ended():
        state = {"model": found[0].state_dict(), "sent": sent}
        torch.save(state, Path(os.environ["KEEP"]) / f"{os.environ['RANK']}.pt")
        end()

    torch.nn.parallel.DistributedDataParallel.__init__ = wrapped
    dist.all_reduce, dist.destroy_process_group = counted, ended


# Three processes with one image each, too: a BatchNorm for each rank could not train so. With few
# images, BatchNorm amplifies rounding more.
@pytest.mark.parametrize("size, batch, tolerance", [(2, 12, 1e-10), (3, 3, 1e-6)])
def test_processes_train_what_one_process_trains(size, batch, tolerance, tmp_path):
    """snsc.py with the same global batch, in double precision: losses, evaluation, weights, and
    running statistics. These are the same on all ranks, to the last bit, though none is sent.
    """
    flags = [*FLAGS, "--epochs", 1, "--batch-size", batch, "--images", 3 * batch, TEST_IMAGES]
    right = train(forked, "snsc.py", *flags, prepare=doubles)
    found = train(partial(world, size), SCRIPT, *flags, prepare=watched, KEEP=tmp_path)
    assert len(found.losses) == 3
    found.equals(right, rel=tolerance)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for name, value in found.weights.items():
        assert all(value.equal(rank["model"][name]) for rank in ranks), name

    # Two all-reduces per layer and step, one forward and one backward, of two numbers per channel.
    modules = models.resnet18(num_classes=10).modules()
    channels = [m.num_features for m in modules if isinstance(m, torch.nn.BatchNorm2d)]
    for rank in ranks:
        assert sorted(rank["sent"]) == sorted(3 * 2 * [2 * count for count in channels])
