"""techniques/custom_optimizer.py: shared work, the weights of an optimizer that is not shared."""

import json

import pytest
from real import FLAGS, numbers, output
from support import ORACLE, checkpoint, forked, refused, succeeded, world
from test_equality import doubles

SCRIPT = "techniques/custom_optimizer.py"
SHORT = [*FLAGS[:4], "--max-steps", 4, "--batch-size", 12, "--lr", 0.005, "--log-every", 1]
SGD = ["--trust", 0, "--schedule", "constant"]
NUMBERS = 11_181_642  # the parameters of resnet18 with 10 classes


def watched() -> None:
    """Runs in a process of the script, which at its end writes what its optimizer keeps."""
    import os
    import pathlib

    import torch

    begin, end = torch.optim.Optimizer.__init__, torch.distributed.destroy_process_group
    made = []

    def init(self, *rest):
        made.append(self)
        begin(self, *rest)

    def keep():
        kept = [value.numel() for each in made[0].state.values() for value in each.values()]
        file = pathlib.Path(os.environ["KEEP"]) / f"{os.environ['RANK']}.json"
        file.write_text(json.dumps([len(kept), sum(kept)]))
        end()

    torch.optim.Optimizer.__init__, torch.distributed.destroy_process_group = init, keep


def plain_loops() -> None:
    """torch's SGD, not fused: additions in the order in which one would write them."""
    import torch

    begin = torch.optim.SGD.__init__

    def init(self, *rest, fused, **keywords):
        begin(self, *rest, foreach=False, **keywords)

    torch.optim.SGD.__init__ = init


def lars_alone() -> None:
    """The oracle's optimizer is LARS on a schedule, unshared: the formulas once more.

    change = g + decay w, made trust times as long as w is; v = 0.9 v + change;
    w = w - rate (change + 0.9 v). The rate rises for 2 steps, then falls along a cosine to 0 in the
    fifth, which is not taken.
    """
    import math

    import torch

    rates = [0.5, 1, (1 + math.cos(math.pi / 3)) / 2, (1 + math.cos(2 * math.pi / 3)) / 2]

    class Lars:
        def __init__(self, weights, lr, momentum, weight_decay, **_):
            self.weights, self.lr, self.steps = list(weights), lr, 0
            self.momentum, self.decay = momentum, weight_decay
            self.velocities = [torch.zeros_like(w) for w in self.weights]

        def zero_grad(self):
            for w in self.weights:
                w.grad = None

        @torch.no_grad()
        def step(self):
            rate = self.lr * rates[self.steps]
            self.steps += 1
            for w, v in zip(self.weights, self.velocities, strict=True):
                change = w.grad + self.decay * w
                if w.ndim > 1:
                    change = change * (0.1 * w.norm() / (change.norm() + 1e-12))
                v.copy_(self.momentum * v + change)
                w.copy_(w - rate * (change + self.momentum * v))

    torch.optim.SGD = Lars


def trained(start, name: str, script: str, *more, **keywords) -> tuple[list[tuple], dict]:
    """The records of a run, and its weights."""
    flags = [*SHORT, *more, *output(f"custom-{name}")]
    weights = flags[-1].with_suffix(".pt")
    runs = start(script, *flags, "--save", weights, **keywords)
    succeeded(*(runs if isinstance(runs, list) else [runs]))
    return numbers(flags), checkpoint(weights)


def of(size):
    return lambda *rest, **keywords: world(size, *rest, **keywords)


def test_without_its_own_ideas_it_is_torchs_sgd(tmp_path):
    """Bit for bit, losses and weights: it is the same sum in another place. And each of the two
    keeps the momentum of its own share alone, which is half of all.
    """
    ours = trained(of(2), "sgd", SCRIPT, *SGD, prepare=watched, KEEP=tmp_path)
    torchs = trained(of(2), "torch", "mnmc_ddp_launch.py", prepare=plain_loops)
    assert ours[0] == torchs[0] and len(ours[0]) == 5
    assert all(value.equal(torchs[1][name]) for name, value in ours[1].items())
    kept = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert sum(count for _, count in kept) == NUMBERS
    assert all(abs(count / NUMBERS - 1 / 2) < 0.001 for _, count in kept)


@pytest.mark.parametrize("size", [2, 3])
def test_lars_is_that_of_one_process(size):
    """In double precision, where the order of a sum does not matter: the oracle's parts, and an
    optimizer that nobody shares, written once more.
    """
    own = ["--warmup-steps", 2]
    found, weights = trained(of(size), f"lars{size}", SCRIPT, *own, prepare=doubles)
    right, exact = trained(forked, f"oracle{size}", ORACLE, "--parts", size, prepare=double_lars)
    assert [line[0] for line in found] == [line[0] for line in right] and len(found) == 5
    for (what, loss, accuracy), (_, other, hits) in zip(found, right, strict=True):
        assert loss == pytest.approx(other, rel=1e-11, abs=0) and accuracy == hits, what
    worst = max((weights[n] - v).abs().max().item() for n, v in exact.items())
    assert worst < 1e-11


def double_lars() -> None:
    doubles()
    lars_alone()


@pytest.mark.parametrize(
    "flag, value", [("--trust", "-1"), ("--schedule", "linear"), ("--warmup-steps", "-1")]
)
def test_a_flag_that_does_not_fit(flag, value):
    flags = output("custom-unfit")
    refused(*world(1, SCRIPT, *SHORT, flag, value, *flags), flag, value)
    assert not flags[-1].exists()
