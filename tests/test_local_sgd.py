"""techniques/local_sgd.py: with an average in each step it is DDP, otherwise it is local models."""

from functools import partial

from real import doubles, exact_oracle, short, train
from support import world

SCRIPT = "techniques/local_sgd.py"
WEIGHTS = 4 * 352_042  # bytes of shufflenet_v2_x0_5's parameters, with 10 classes


def test_an_average_in_each_step_is_ddp():
    """SGD is linear in the gradient, with momentum and weight decay, too: the mean of two steps
    from the same weights is a step by the mean gradient. In double precision, since BatchNorm
    amplifies rounding.
    """
    exact = exact_oracle(2)
    train(partial(world, 2), SCRIPT, *short(), "--sync-every", 1, prepare=doubles).equals(
        exact, rel=1e-9
    )


def test_weights_are_averaged_every_two_steps_and_at_an_epochs_end():
    """All of them; in the other steps, nothing is all-reduced."""
    run = train(partial(world, 2), SCRIPT, *short(), "--sync-every", 2)
    steps = [line for line in run.records if line["event"] == "train"]
    assert [step.get("all_reduces", 0) for step in steps] == [0, 1, 1, 0, 1, 1]
    assert all(
        step.get("all_reduce_bytes", 0) == WEIGHTS * step.get("all_reduces", 0) for step in steps
    )
