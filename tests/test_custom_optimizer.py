"""techniques/custom_optimizer.py: sharded work, the weights of an optimizer that is not sharded."""

from functools import partial

import spies
from real import doubles, short, train, unfused
from spies import said
from support import ORACLE, forked, world

SCRIPT = "techniques/custom_optimizer.py"
LARGEST = 4 * 192 * 1024  # bytes of the largest weight of shufflenet_v2_x0_5
SGD = ["--trust", 0, "--schedule", "constant"]


def lars_alone() -> None:
    """Runs in the oracle's process: its optimizer is LARS on a schedule, not sharded.

    The formulas once more: change = g + decay w, made trust times as long as w is;
    v = 0.9 v + change; w = w - rate (change + 0.9 v). The rate rises for 2 steps, then falls along
    a cosine to 0 in the seventh, which is not taken.
    """
    import math

    import torch

    doubles()
    rates = [0.5, 1, *((1 + math.cos(math.pi * k / 5)) / 2 for k in (1, 2, 3, 4))]

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


def test_without_lars_and_schedule_it_is_torchs_sgd():
    """Bit for bit: the same arithmetic, on another rank. Each rank ends with the
    momentum of its own weights, also after saving. One of them has more than half of all numbers.
    """
    ours = train(partial(world, 2, prepare=spies.held), SCRIPT, *short(), *SGD)
    assert len(ours.losses) == 6
    ours.equals(train(forked, ORACLE, *short(), "--parts", 2, prepare=unfused))
    (weights, _, first), (_, _, second) = (said(out, "held")[0] for out in ours.outs)
    assert [first, second] == [LARGEST, weights - LARGEST]


def test_lars_is_that_of_one_process():
    """In double precision, where the order of a sum does not matter, with the oracle's parts."""
    flags = [*short(), "--batch-size", 60]
    ours = train(partial(world, 3), SCRIPT, *flags, "--warmup-steps", 2, prepare=doubles)
    right = train(forked, ORACLE, *flags, "--parts", 3, prepare=lars_alone)
    assert len(right.losses) == 6
    ours.equals(right, rel=1e-11)
