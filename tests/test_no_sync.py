"""Gradient accumulation: grad_accum.py on one device, no_sync.py on several ranks."""

import os
from functools import cache, partial

import pytest
from real import EPOCH, FLAGS, STEPS, Trained, data, doubles, short, train
from support import ORACLE, forked, refused, succeeded, world

NO_SYNC, GRAD_ACCUM = "techniques/no_sync.py", "techniques/grad_accum.py"
GRADIENTS = 4 * 11_181_642  # bytes, of resnet18 with 10 classes


def test_no_sync_trains_what_the_oracle_trains():
    """Bit for bit over an epoch, BatchNorm's running statistics too: each rank adds up its parts in
    their order, and a sum of two ranks has one order only.
    """
    parts = ["--accum-steps", 4]
    found = train(partial(world, 2), NO_SYNC, *EPOCH, *parts)
    assert len(found.losses) == STEPS
    found.equals(train(forked, ORACLE, *EPOCH, *parts, "--parts", 2, limit=900))


def test_grad_accum_trains_what_the_oracle_trains():
    """Bit for bit over an epoch. The parts are contiguous, and computed one after the other."""
    parts = ["--accum-steps", 2]
    found = train(forked, GRAD_ACCUM, *EPOCH, *parts)
    assert len(found.losses) == STEPS
    found.equals(train(forked, ORACLE, *EPOCH, *parts, "--split", "contiguous"))


@cache
def ranks_of_two() -> Trained:
    """Two data-parallel parts, in the order of the images."""
    return train(forked, ORACLE, *short(), "--parts", 2, "--split", "contiguous")


def test_a_batch_in_parts_trains_what_as_many_ranks_train():
    """The same losses and weights. The running statistics differ: here each part updates them, and
    of data-parallel ranks the first one's are used.
    """
    found, ranks = train(forked, GRAD_ACCUM, *short(), "--accum-steps", 2), ranks_of_two()
    assert found.losses == ranks.losses
    assert found.evaluations[0]["loss"] != ranks.evaluations[0]["loss"]
    for name, value in found.weights.items():
        statistics = "running_" in name or "num_batches" in name
        assert value.equal(ranks.weights[name]) != statistics, name


def test_parts_of_ranks_are_the_parts_of_more_ranks():
    """Two on each of three: what six ranks train. In double precision: their sum has another order,
    and BatchNorm makes such a difference grow from step to step.

    Here each part updates the running statistics, there only the first: evaluations differ.
    """
    flags = [*short(), "--batch-size", 60, "--epochs", 1]
    accum = ["--accum-steps", 2]
    found = train(partial(world, 3), NO_SYNC, *flags, *accum, prepare=doubles)
    right = train(forked, ORACLE, *flags, "--parts", 6, prepare=doubles)
    assert found.losses == pytest.approx(right.losses, rel=1e-12, abs=0) and len(found.losses) == 3
    for name, value in found.weights.items():
        if "running_" not in name and "num_batches" not in name:
            assert (value - right.weights[name]).abs().max() < 1e-11, name


def counted() -> None:
    """Runs in the script's process: each step prints how often DDP all-reduces, and how much."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_post_hook

    made, sent = DistributedDataParallel.__init__, []

    def hook(state, bucket):
        sent.append(bucket.buffer().nbytes)
        return default_hooks.allreduce_hook(state, bucket)

    def make(self, *arguments, **keywords):
        made(self, *arguments, **keywords)
        self.register_comm_hook(None, hook)

    def after(*_):
        print("sent", len(sent), sum(sent))
        sent.clear()

    DistributedDataParallel.__init__ = make
    register_optimizer_step_post_hook(after)
    if os.environ.get("TEST_ALWAYS_SYNC"):
        from contextlib import nullcontext

        DistributedDataParallel.no_sync = nullcontext


@pytest.mark.parametrize("always, times", [("", 1), ("yes", 4)])
def test_gradients_are_sent_once_per_step(always, times):
    """In one bucket the first time, then in three; without no_sync() once for each part."""
    flags = [*FLAGS, "--data", data(), "--image-size", 16, "--max-steps", 2, "--accum-steps", 4]
    runs = world(2, NO_SYNC, *flags, prepare=counted, TEST_ALWAYS_SYNC=always)
    succeeded(*runs)
    for run in runs:
        lines = [line.split()[1:] for line in run.out.splitlines() if line.startswith("sent")]
        sent = [(int(count), int(size)) for count, size in lines]
        assert {size for _, size in sent} == {times * GRADIENTS}
        assert [count for count, _ in sent] == [3 * times - 2, 3 * times]


def buckets() -> None:
    """Runs in the script's process: prints after each part but the last whether its gradients are
    in as few tensors as DDP has buckets.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    made, zero = DistributedDataParallel.__init__, torch.optim.Optimizer.zero_grad
    kept = {}

    def make(self, module, **options):
        made(self, module, **options)
        kept["module"] = module

    def places() -> set[int]:
        weights = kept["module"].parameters()
        return {w.grad.untyped_storage().data_ptr() for w in weights if w.grad is not None}

    def cleared(self, *words, **options):
        zero(self, *words, **options)
        print("buckets", len(places()))

    DistributedDataParallel.__init__, torch.optim.Optimizer.zero_grad = make, cleared


def test_the_parts_add_up_in_ddps_buckets():
    """From the second step on. With None instead of zero there would be no gradients left."""
    flags = [*FLAGS, "--data", data(), "--image-size", 16, "--max-steps", 3]
    (run,) = world(1, NO_SYNC, *flags, prepare=buckets)
    succeeded(run)
    found = [line for line in run.out.splitlines() if line.startswith("buckets")]
    assert found == ["buckets 0", "buckets 1", "buckets 3"]


@pytest.mark.parametrize("script", [NO_SYNC, GRAD_ACCUM])
def test_parts_that_do_not_fit(script):
    """64 images in 3 parts: no error of PyTorch's, and a wrong mean."""
    flags = [*short(), "--accum-steps", 3]
    (done,) = world(1, script, *flags) if script == NO_SYNC else [forked(script, *flags)]
    refused(done, "--accum-steps")
