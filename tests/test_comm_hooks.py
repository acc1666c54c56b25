"""techniques/comm_hooks.py: an exact hook trains the oracle's numbers; lossy ones are this far off.

The probe counts what Python code gives to all-reduces. DDP's own all-reduce is no Python code.
"""

from functools import partial

import torch
from real import Trained, oracle, short, train
from support import ORACLE, forked, world
from torchvision import models

SCRIPT = "techniques/comm_hooks.py"
PARAMETERS = 352_042  # of shufflenet_v2_x0_5 with 10 classes


def sent(run: Trained) -> list[int]:
    """The bytes all-reduced in each step."""
    return [line["all_reduce_bytes"] for line in run.records if line["event"] == "train"]


def parameters(weights: dict) -> torch.Tensor:
    """All of them in one row. BatchNorm's statistics are not trained."""
    names = dict(model().named_parameters())
    return torch.cat([weights[name].double().flatten() for name in names])


def model() -> torch.nn.Module:
    """The weights that seed 0 makes."""
    torch.manual_seed(0)
    return models.get_model("shufflenet_v2_x0_5", num_classes=10)


def low_rank() -> int:
    """The bytes of a row and a column for each matrix that they make half as small, or smaller."""
    total = 0
    for weight in model().parameters():
        rows, columns = len(weight), weight.numel() // len(weight)
        small = weight.ndim > 1 and 2 * (rows + columns) < weight.numel()
        total += 4 * (rows + columns if small else weight.numel())
    return total


def test_a_hook_of_ones_own_trains_what_the_oracle_trains():
    """Bit for bit, and all-reduces every gradient once in each step."""
    run = train(partial(world, 2), SCRIPT, *short(), "--hook", "own")
    run.equals(oracle(2))
    assert sent(run) == [4 * PARAMETERS] * 6


def test_bf16_rounds_the_gradients_and_sends_half():
    """Eight binary digits: each gradient is off by 1/256 at most, and all of them by less.

    A hook that does not divide would be 1.0 away, and one that sends nothing about as far.
    """
    one = [*short(), "--epochs", 1, "--images", 64, 20]
    run = train(partial(world, 2), SCRIPT, *one, "--hook", "bf16")
    exact = parameters(train(forked, ORACLE, *one, "--parts", 2).weights)
    before = parameters(model().state_dict())
    off = (parameters(run.weights) - exact).norm() / (exact - before).norm()
    assert 5e-4 < off < 4e-3
    assert sent(run) == [2 * PARAMETERS]


def test_powersgd_sends_three_steps_whole_and_then_rows_and_columns():
    """So the loss is the oracle's, to the last bit, up to step 4, whose gradients are compressed.

    That update is 0.72 of its length away from the exact one. It would be 0.78 away without a
    gradient in this step, and as far with twice the gradient that PowerSGD makes.
    """
    four = [*short(), "--epochs", 1, "--batch-size", 48]
    run = train(partial(world, 2), SCRIPT, *four, "--hook", "powersgd")
    exact = train(forked, ORACLE, *four, "--parts", 2)
    three = train(forked, ORACLE, *four, "--parts", 2, "--max-steps", 3)
    assert run.losses == exact.losses
    assert sent(run) == [4 * PARAMETERS] * 3 + [low_rank()]
    assert low_rank() < 4 * PARAMETERS / 5
    after = parameters(exact.weights)
    off = (parameters(run.weights) - after).norm() / (after - parameters(three.weights)).norm()
    assert 0.6 < off < 0.75
