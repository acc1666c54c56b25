"""Gradient accumulation: grad_accum.py on one device, no_sync.py on several ranks."""

from real import FLAGS, data, oracle, short, train
from spies import after_each_step, at_calls, said, tell
from support import forked, succeeded, world

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


def counted() -> None:
    """Runs in the script's process: each step tells how often DDP all-reduces, and how much."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

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


def test_gradients_are_sent_once_per_step():
    """In one bucket the first time, then in three."""
    flags = [*FLAGS, "--data", data(), "--image-size", 16, "--max-steps", 2, "--accum-steps", 4]
    runs = world(2, NO_SYNC, *flags, prepare=counted)
    succeeded(*runs)
    for run in runs:
        assert said(run.out, "sent") == [[1, GRADIENTS], [3, GRADIENTS]]
