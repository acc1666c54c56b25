"""techniques/syncbn.py: several processes train what one process trains with the whole batch."""

import json

import pytest
from real import FLAGS, numbers, output
from support import checkpoint, forked, refused, succeeded, world
from test_equality import doubles

SCRIPT = "techniques/syncbn.py"
SHORT = [*FLAGS[:4], "--max-steps", 3, "--lr", 0.005, "--log-every", 1]
CHANNELS = 4800  # of resnet18's 20 BatchNorm layers, together


def watched() -> None:
    """Runs in a process of the script, in double precision. At its end it writes what DDP's model
    has become here, and the number of tensors and numbers that went into our all-reduces.
    """
    import os
    import pathlib

    import torch
    import torch.distributed as dist

    doubles()
    kept = pathlib.Path(os.environ["KEEP"]) / os.environ["RANK"]
    end, all_reduce = dist.destroy_process_group, dist.all_reduce
    begin = torch.nn.parallel.DistributedDataParallel.__init__
    models, sent = [], []

    def wrap(self, model, **keywords):
        models.append(model)
        begin(self, model, **keywords)

    def count(tensor, *rest):
        if tensor.ndim == 2:  # means of the numbers and of their squares
            sent.append(tensor.numel())
        return all_reduce(tensor, *rest)

    def keep():
        torch.save(models[0].state_dict(), kept.with_suffix(".pt"))
        kept.with_suffix(".json").write_text(json.dumps([len(sent), sum(sent)]))
        end()

    torch.nn.parallel.DistributedDataParallel.__init__ = wrap
    dist.all_reduce, dist.destroy_process_group = count, keep


# 3 processes with an image each: a BatchNorm of its own could not train so.
# With so few images BatchNorm makes rounding errors grow faster.
@pytest.mark.parametrize("size, batch, tolerance", [(2, 12, 1e-11), (3, 3, 1e-6)])
def test_processes_train_what_one_process_trains(size, batch, tolerance, tmp_path):
    """Plain snsc.py with the whole batch, in double precision: losses, evaluation, weights, and
    running averages. These are the same in all processes, to the last bit, though none sends its
    own. And what goes over the wire is what the page says.
    """
    import torch

    plain, flags = tmp_path / "plain.pt", [*SHORT, "--batch-size", batch]
    alone = [*flags, "--save", plain, *output(f"syncbn-{batch}")]
    succeeded(forked("snsc.py", *alone, prepare=doubles))
    weights, right = tmp_path / "weights.pt", numbers(alone)
    flags += ["--save", weights, *output(f"syncbn-{batch}-{size}")]
    succeeded(*world(size, SCRIPT, *flags, prepare=watched, KEEP=tmp_path))

    found = numbers(flags)
    assert [line[0] for line in found] == [line[0] for line in right] and len(found) == 4
    for (what, loss, accuracy), (_, exact, hits) in zip(found, right, strict=True):
        assert loss == pytest.approx(exact, rel=tolerance, abs=0) and accuracy == hits, what
    saved, exact = checkpoint(weights), checkpoint(plain)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for name, value in saved.items():
        assert all(value.equal(other[name]) for other in ranks), name
        torch.testing.assert_close(value, exact[name], rtol=tolerance, atol=tolerance)
    for rank in range(size):  # 3 steps, in each a message forward and one backward
        sent = json.loads((tmp_path / f"{rank}.json").read_text())
        assert sent == [3 * 2 * 20, 3 * 2 * 2 * CHANNELS]


def test_the_first_steps_in_single_precision():
    """Where other sums round otherwise, and BatchNorm makes the difference grow from step to step.

    Processes that normalize by themselves are much further off.
    """
    flags = [*SHORT, "--batch-size", 64, "--lr", 0.0002]
    found = {}
    for name, size in (("snsc.py", 1), ("mnmc_ddp_launch.py", 2), (SCRIPT, 2)):
        own = [*flags, *output(f"syncbn-{name.replace('/', '-')}")]
        succeeded(*world(size, name, *own))
        found[name] = [line[1] for line in numbers(own)]
    right, ddp, ours = found.values()
    assert ours[0] == pytest.approx(right[0], rel=1e-6, abs=0)
    assert ours == pytest.approx(right, rel=5e-3, abs=0)
    assert abs(ddp[0] / right[0] - 1) > 1e-3


def test_a_batch_that_is_no_multiple():
    flags = [*SHORT, *output("syncbn-one")]
    for process in world(2, SCRIPT, *flags, "--batch-size", 3):
        refused(process, "--batch-size 3", "multiple of the 2")
    assert not flags[-1].exists()
