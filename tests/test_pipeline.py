"""Pipeline parallelism: pipeline.py by torch.distributed.pipelining, pipeline_by_hand.py without.

Both train what one process trains that computes the micro-batches one after the other. They send
and hold what their pages' formulas say.
"""

import runpy
from functools import cache, partial

import pytest
import spies
import torch
from real import FLAGS, Trained, data, doubles, short, train
from spies import numbers_sent, said
from support import ORACLE, ROOT, forked, full, succeeded, world
from test_diffs import functions
from torchvision import models

LIBRARY, HAND = "techniques/pipeline.py", "techniques/pipeline_by_hand.py"
GPIPE, ONE_F_ONE_B = (LIBRARY, "--schedule", "gpipe"), (LIBRARY, "--schedule", "1f1b")
INTERLEAVED = (LIBRARY, "--schedule", "interleaved")
ZERO_BUBBLE = (LIBRARY, "--schedule", "zero-bubble")
HOWS = [(HAND,), ONE_F_ONE_B]
SMALL = [*FLAGS, "--data", data(), "--image-size", 16]  # resnet18
BATCH = 64


@cache
def oracle(flags: tuple, parts: int = 4, double: bool = False) -> Trained:
    """One process that accumulates the gradients of the micro-batches."""
    words = [*flags, "--micro-batches", parts]
    return train(forked, ORACLE, *words, prepare=doubles if double else None)


@pytest.mark.parametrize("how", [*HOWS, *full((GPIPE,), (INTERLEAVED,))], ids=lambda how: how[-1])
def test_two_stages_train_what_the_oracle_trains(how):
    """In single precision. The 101 test images are a batch of 64, and one of 37 that is filled.

    Weights are equal to the last bit. A step's loss is the mean of its micro-batches' losses, which
    the oracle adds up elsewhere.
    """
    found = train(partial(world, 2), *how, *short())
    assert {line["images"] for line in found.evaluations} == {101}
    found.equals(oracle(tuple(short())), losses=1e-6)


@pytest.mark.parametrize("how", HOWS, ids=lambda how: how[-1])
def test_four_ranks_train_what_the_oracle_trains(how):
    """In double precision, in eight micro-batches. Two steps."""
    flags = [*short(), "--epochs", 1, "--images", 128, 101]
    found = train(partial(world, 4), *how, *flags, "--micro-batches", 8, prepare=doubles)
    found.equals(oracle(tuple(flags), 8, double=True), losses=1e-15)


@pytest.mark.full
def test_zero_bubble_trains_what_the_oracle_trains():
    """With resnet18. The blocks of shufflenet end in a view, which PyTorch 2.15 cannot detach."""
    flags = [*SMALL, "--epochs", 1]
    found = train(partial(world, 2), *ZERO_BUBBLE, *flags)
    found.equals(oracle(tuple(flags)), losses=1e-6)


# What four ranks hold and send


def saves() -> None:
    """Runs in the script's process: tells after a step the bytes saved for backward at most, and
    all that was saved.
    """
    from torch.autograd.graph import saved_tensors_hooks

    count = {"now": 0, "most": 0, "all": 0}

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor
            count["now"] += tensor.nbytes
            count["all"] += tensor.nbytes
            count["most"] = max(count["most"], count["now"])

        def __del__(self):
            count["now"] -= self.tensor.nbytes

    saved_tensors_hooks(Saved, lambda saved: saved.tensor).__enter__()
    spies.after_each_step(lambda: spies.tell("saved", [count["most"], count["all"]]))


def observed() -> None:
    saves()
    spies.sent()


PARTS = 8  # micro-batches
DEEP = [*FLAGS, "--data", data(), "--arch", "resnet34", "--image-size", 32]


@cache
def one_step(how: tuple) -> list:
    """The output of each of four ranks."""
    flags = [*DEEP, "--micro-batches", PARTS, "--max-steps", 1]
    ranks = world(4, *how, *flags, prepare=observed)
    succeeded(*ranks)
    return [rank.out for rank in ranks]


@pytest.mark.parametrize(
    ("how", "micro_batches"),
    [
        ((HAND,), [8, 8, 8, 8]),
        (ONE_F_ONE_B, [4, 3, 2, 1]),
        *full((GPIPE, [8, 8, 8, 8])),
    ],
    ids=["by hand", "1f1b", "gpipe"],
)
def test_micro_batches_held_for_backward(how, micro_batches):
    """Exactly: GPipe all 8 of a step; of 1F1B, rank r of p has at most p - r. A stage saves as many
    bytes of each micro-batch.
    """
    for out, most in zip(one_step(how), micro_batches, strict=True):
        ((peak, total),) = said(out, "saved")
        assert PARTS * peak == most * total > 0


@pytest.mark.parametrize("how", HOWS, ids=lambda how: how[-1])
def test_what_is_sent(how):
    """Exactly: forward the activations of the batch at each cut, and back their gradients. The
    number of micro-batches does not matter.
    """
    split = runpy.run_path(str(ROOT / LIBRARY))["split"]
    model = models.get_model("resnet34", num_classes=10)
    cuts = [shape.numel() // PARTS for shape in split(model, 4, BATCH, 32)[1][1:-1]]
    for rank, out in enumerate(one_step(how)):
        mine = [n for k, n in enumerate(cuts) for end in (k, k + 1) if end == rank]
        sent = [n for n in numbers_sent(out, "isend") if n > 1]  # 1: a greeting
        assert sorted(sent) == sorted(PARTS * mine)


def test_each_rank_holds_its_stage():
    """Equal computing is not equal memory: resnet18's last layers have most weights."""
    flags = [*FLAGS, "--data", data(), "--max-steps", 1]
    ranks = world(2, LIBRARY, *flags, prepare=spies.held)
    succeeded(*ranks)
    found = [said(rank.out, "held")[0] for rank in ranks]
    assert all(len({*kinds}) == 1 for kinds in found)
    first, second = (kinds[0] for kinds in found)
    assert first + second == 4 * 11_181_642
    assert (round(first / 1e6, 1), round(second / 1e6, 1)) == (2.7, 42.0)


def test_stages_are_balanced():
    """No stage computes half as much again as the mean. Each layer is in one stage."""
    from torch.utils.flop_counter import FlopCounterMode

    split = runpy.run_path(str(ROOT / HAND))["split"]
    model = models.get_model("resnet18", num_classes=10)
    parts, shapes = split(model, 4, 2, 32)
    flops, x = [], torch.rand(2, 3, 32, 32)
    for part, shape in zip(parts, shapes, strict=False):
        assert x.shape == shape.shape
        with FlopCounterMode(display=False) as counter:
            x = part(x)
        flops.append(counter.get_total_flops())
    assert max(flops) < 1.5 * sum(flops) / 4
    names = [id(weight) for part in parts for weight in part.parameters()]
    assert names == [id(weight) for weight in model.parameters()]


@pytest.mark.parametrize("script", [LIBRARY, HAND])
def test_models_that_cannot_be_split(script):
    """test_bad_input.py has a forward() that does more than its layers."""
    split = runpy.run_path(str(ROOT / script))["split"]
    with pytest.raises(SystemExit, match="too few layers"):
        split(models.get_model("resnet18", num_classes=10), 40, 2, 32)
    with pytest.raises(SystemExit, match="ConvNeXt has layers whose output is not contiguous"):
        split(models.get_model("convnext_tiny"), 2, 2, 32)


def test_both_cut_and_save_alike():
    one, other = (functions((ROOT / script).read_text()) for script in (LIBRARY, HAND))
    for name in ("split", "find_layers", "save"):
        assert one[name] == other[name]
