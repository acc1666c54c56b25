"""Gradient accumulation: grad_accum.py on one device, no_sync.py on several ranks."""

from contextlib import nullcontext
from functools import partial

import pytest
from real import FLAGS, data, doubles, oracle, short, train
from spies import ALWAYS, after_each_step, at_calls, said, tell
from support import ORACLE, forked, full, succeeded, world

NO_SYNC, GRAD_ACCUM = "techniques/no_sync.py", "techniques/grad_accum.py"
GRADIENTS = 4 * 11_181_642  # bytes, of resnet18 with 10 classes


def test_a_batch_in_parts_trains_what_as_many_ranks_train():
    """The same losses and weights. The running statistics differ: here each part updates them, and
    of data-parallel ranks the first one's are used.
    """
    found = train(forked, GRAD_ACCUM, *short(), "--accum-steps", 2)
    ranks = oracle(2, "--split", "contiguous")
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


def counted(always: bool) -> None:
    """Runs in the script's process: each step tells how often DDP all-reduces, and how much.

    always: without no_sync().
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    sent = []

    def hook(state, bucket):
        sent.append(bucket.buffer().nbytes)
        return default_hooks.allreduce_hook(state, bucket)

    def make(made, ddp, *arguments, **keywords):
        made(ddp, *arguments, **keywords)
        ddp.register_comm_hook(None, hook)

    def after():
        tell("sent", [len(sent), sum(sent)])
        sent.clear()

    at_calls({1}, "torch.nn.parallel.DistributedDataParallel.__init__", make)
    after_each_step(after)
    if always:
        DistributedDataParallel.no_sync = nullcontext


@pytest.mark.parametrize("always, times", [(False, 1), *full((True, 4))])
def test_gradients_are_sent_once_per_step(always, times):
    """In one bucket the first time, then in three; without no_sync() once for each part."""
    flags = [*FLAGS, "--data", data(), "--image-size", 16, "--max-steps", 2, "--accum-steps", 4]
    runs = world(2, NO_SYNC, *flags, prepare=partial(counted, always))
    succeeded(*runs)
    for run in runs:
        counts, sizes = zip(*said(run.out, "sent"), strict=True)
        assert {*sizes} == {times * GRADIENTS} and counts == (3 * times - 2, 3 * times)


def buckets() -> None:
    """Runs in the script's process: tells, whenever gradients are set to zero, how many pieces of
    memory they are in.
    """

    def cleared(zero, optimizer, *words, **options):
        zero(optimizer, *words, **options)
        gradients = [w.grad for group in optimizer.param_groups for w in group["params"]]
        places = {grad.untyped_storage().data_ptr() for grad in gradients if grad is not None}
        tell("buckets", len(places))

    at_calls(ALWAYS, "torch.optim.Optimizer.zero_grad", cleared)


def test_the_parts_add_up_in_ddps_buckets():
    """From the second step on. With None instead of zero there would be no gradients left."""
    flags = [*FLAGS, "--data", data(), "--image-size", 16, "--max-steps", 3]
    (run,) = world(1, NO_SYNC, *flags, prepare=buckets)
    succeeded(run)
    assert said(run.out, "buckets") == [0, 1, 3]
