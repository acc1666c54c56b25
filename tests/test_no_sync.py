"""techniques/no_sync.py: parts of a batch in each of several processes, and one exchange a step."""

import os

import pytest
from real import FLAGS, numbers, output
from real import compare as compare_exactly
from support import ORACLE, checkpoint, forked, refused, succeeded, world
from test_equality import doubles

SCRIPT = "techniques/no_sync.py"
GRADIENTS = 4 * 11_181_642  # bytes, of resnet18 with 10 classes


def trained(size: int, *flags, prepare=None) -> tuple[list[tuple], dict]:
    """The records of so many processes and their weights."""
    flags = [*FLAGS, *flags, *output(f"no-sync-{size}")]
    weights = flags[-1].with_suffix(".pt")
    succeeded(*world(size, SCRIPT, *flags, "--save", weights, prepare=prepare))
    return numbers(flags), checkpoint(weights)


def exact(parts: int, *flags, prepare=None) -> tuple[list[tuple], dict]:
    """The oracle's."""
    flags = [*FLAGS, "--parts", parts, *flags, *output(f"no-sync-oracle-{parts}")]
    weights = flags[-1].with_suffix(".pt")
    succeeded(forked(ORACLE, *flags, "--save", weights, prepare=prepare))
    return numbers(flags), checkpoint(weights)


@pytest.mark.parametrize("size, steps", [(1, 4), (2, 2)])
def test_trains_what_the_oracle_trains(size, steps):
    """Bit for bit, BatchNorm's averages too: each process adds up its parts in their order, and a
    sum of two processes has one order only.
    """
    flags = ["--accum-steps", steps]
    (found, weights), (right, theirs) = trained(size, *flags), exact(size, *flags)
    compare_exactly(found, right, 0)
    assert all(value.equal(theirs[name]) for name, value in weights.items())


def test_parts_of_processes_are_the_parts_of_more_processes():
    """Two in each of three: what the oracle of six processes trains. In double precision: its sum
    has another order, and BatchNorm makes such a difference grow from step to step.

    Here each part moves BatchNorm's averages, there the first one alone: evaluations differ.
    """
    flags = ["--batch-size", 60, "--max-steps", 2]
    found, weights = trained(3, *flags, "--accum-steps", 2, prepare=doubles)
    right, theirs = exact(6, *flags, prepare=doubles)
    assert [line[0] for line in found] == [line[0] for line in right]
    for (what, loss, accuracy), (_, other, hits) in zip(found[:2], right[:2], strict=True):
        assert loss == pytest.approx(other, rel=1e-12) and accuracy == hits, what
    for name, value in weights.items():
        if "running_" not in name and "num_batches" not in name:
            assert (value - theirs[name]).abs().max() < 1e-12, name


def counted() -> None:
    """Runs in the script's process: each step prints how often DDP has sent, and how much."""
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
def test_gradients_are_sent_once_a_step(always, times):
    """In one bucket the first time, then in three; without no_sync() once for each part."""
    flags = [*FLAGS, "--max-steps", 3, "--accum-steps", 4, *output("no-sync-counted")]
    runs = world(2, SCRIPT, *flags, prepare=counted, TEST_ALWAYS_SYNC=always)
    succeeded(*runs)
    for run in runs:
        lines = [line.split()[1:] for line in run.out.splitlines() if line.startswith("sent")]
        sent = [(int(count), int(size)) for count, size in lines]
        assert {size for _, size in sent} == {times * GRADIENTS}
        assert [count for count, _ in sent] == [3 * times - 2, 3 * times, 3 * times]


@pytest.mark.parametrize("batch, parts", [(64, 3), (64, 32), (64, 0)])
def test_parts_that_do_not_fit(batch, parts):
    """64 images of two processes in 3 parts each, in parts of one image, in none."""
    flags = [*FLAGS, "--batch-size", batch, "--accum-steps", parts, *output("no-sync-unfit")]
    for process in world(2, SCRIPT, *flags):
        refused(process, "--accum-steps" if parts else "0")
    assert not flags[-1].exists()
