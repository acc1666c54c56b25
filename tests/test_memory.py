"""Techniques that save memory: zero1.py, fsdp.py, custom_optimizer.py, activation_checkpointing.py.

They hold what the formulas on their pages say. test_equality.py and test_resume.py have what they
train.
"""

from collections import Counter
from functools import partial

import pytest
import spies
from real import FLAGS, data, doubles, small_models, train
from spies import said
from support import ORACLE, forked, full, succeeded, world

from bench.formulas import all_reduced, states

TINY = 546_186  # parameters of vit_tiny with ten classes
PADDING = 128 + 65 * 128  # its class token and positions have one row: no second shard
WEIGHTS = 4 * 11_181_642  # bytes of resnet18 with ten classes
IMAGES = 32  # of a rank in a step
# Bytes that a forward keeps of an image of 32 pixels. In no block: the image, what the first
# convolution and its ReLU give, the indices of max pooling (of 8 bytes), and the last input.
REST = 4 * (3 * 32**2 + 2 * 64 * 16**2 + 512) + 8 * 64 * 8**2
LAYERS = [64 * 8**2, 128 * 4**2, 256 * 2**2, 512]  # numbers in what a block of layer1 ... gives
# There are two blocks in each layer. The input of the first comes from the layer before.
INPUTS = 4 * sum([LAYERS[0], *LAYERS[:3], *LAYERS])
INSIDE = 4 * sum(3 * size for size in LAYERS for _ in range(2))  # two convolutions and a ReLU
INSIDE += 4 * sum(LAYERS[1:])  # a third convolution, where a layer halves the image
INSIDE += 4 * LAYERS[3]  # the result of the last block; the others' are inputs
CHECKPOINTING = "techniques/activation_checkpointing.py"


def held(ranks: list) -> list[tuple]:
    """Bytes on each rank: of the weights, of the gradients, of the momentum."""
    return [*zip(*(said(rank.out, "held")[0] for rank in ranks), strict=True)]


# The name, the number of processes, the stage of ZeRO.
CASES = [
    ("zero1", 2, 1),
    ("fsdp", 2, 3),
    *full(("custom_optimizer", 2, 1), ("fsdp", 3, 3)),
]


@pytest.mark.parametrize("name, size, stage", CASES)
def test_each_rank_holds_its_share(name, size, stage):
    """What is measured agrees with the formula, and nothing is on no rank."""
    flags = [*FLAGS, "--data", data(), "--image-size", 16, "--epochs", 1]
    flags += ["--batch-size", 4 * size, "--images", 4 * size, 8]
    ranks = world(size, f"techniques/{name}.py", *flags, prepare=spies.held)
    succeeded(*ranks)
    for kind, share in zip(held(ranks), states(WEIGHTS, (1, 1, 1), stage, size), strict=True):
        assert kind == pytest.approx([share] * size, rel=0.15)
        assert sum(kind) >= WEIGHTS
        if size == 2 and share < WEIGHTS:  # what the pages say
            assert [round(n / 1e6, 1) for n in kind] == [22.4, 22.4]


def watched() -> None:
    """Runs in the script's process, in double precision: what it holds, and what it sends."""
    small_models()
    spies.held()
    spies.sent()


@pytest.mark.full
def test_hybrid_fsdp_holds_a_shard_and_sends_no_weights_between_machines():
    """Two rows of two ranks train what the oracle trains, in double precision; see the formulas.

    A model without BatchNorm, which would make the rounding of four numbers grow over the steps.
    """
    steps = 10
    flags = [*FLAGS, "--arch", "vit_tiny", "--epochs", 1, "--batch-size", 8]
    flags += ["--images", steps * 8, 101]
    start = partial(world, 4, prepare=watched)
    run = train(start, "techniques/hybrid_fsdp.py", *flags, "--shard-size", 2)
    assert len(run.losses) == steps
    run.equals(train(forked, ORACLE, *flags, "--parts", 4, prepare=doubles), rel=1e-12)
    (messages,) = said(run.outs[0], "sent")
    numbers = Counter()  # all ranks exchange only sums of metrics
    for name, count, ranks in messages["train"]:
        if ranks:
            numbers[name, *ranks] += count
    # Rank 0 gathers and scatters with its neighbor; with the other row it averages half as much.
    row, column = ("reduce_scatter_single", 0, 1), ("all_reduce", 0, 2)
    assert numbers.keys() == {("all_gather_single", 0, 1), row, column}
    assert numbers[row] == 2 * numbers[column] == steps * (TINY + PADDING)
    assert all_reduced(8 * TINY / 2, 2) == pytest.approx(8 * numbers[column] / steps, rel=0.02)
    for out in run.outs:
        assert said(out, "held")[0] == pytest.approx([*states(TINY, (8, 8, 8), 3, 2)], rel=0.02)


def initialized() -> None:
    """Runs in the script's process: tells where weights are initialized with random numbers."""

    def init(kaiming, tensor, **options):
        spies.tell("initialized", tensor.device.type)
        return kaiming(tensor, **options)

    spies.at_calls(spies.ALWAYS, "torch.nn.init.kaiming_normal_", init)


def test_only_rank_0_makes_the_weights_of_fsdp():
    """And in CPU memory: on the others they are without memory, on the meta device."""
    flags = [*FLAGS, "--data", data(), "--image-size", 16, "--batch-size", 4, "--max-steps", 1]
    ranks = world(2, "techniques/fsdp.py", *flags, prepare=initialized)
    succeeded(*ranks)
    found = [{*said(rank.out, "initialized")} for rank in ranks]
    assert found == [{"meta", "cpu"}, {"meta"}]


def counted() -> None:
    """Runs in the script's process: tells the bytes that the first forward keeps for backward.

    Without the model's own; memory that tensors share counts once.
    """
    from torch.autograd.graph import saved_tensors_hooks

    def counting(forward, ddp, *inputs):
        kept = []
        with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
            result = forward(ddp, *inputs)
        own = {x.untyped_storage().data_ptr() for x in [*ddp.parameters(), *ddp.buffers()]}
        memory = [tensor.untyped_storage() for tensor in kept]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in memory}
        spies.tell("kept", sum(size for place, size in sizes.items() if place not in own))
        return result

    spies.at_calls({1}, "torch.nn.parallel.DistributedDataParallel.forward", counting)


def counted_plain() -> None:
    """The same, and nothing is checkpointed."""
    import torch.utils.checkpoint

    counted()
    torch.utils.checkpoint.checkpoint = lambda block, *inputs, **_: block(*inputs)


@pytest.mark.parametrize(
    "prepare, each, megabytes",
    [(counted, REST + INPUTS, 8.1), (counted_plain, REST + INPUTS + INSIDE, 14.6)],
)
def test_forward_keeps_the_inputs_of_blocks(prepare, each, megabytes):
    """And without checkpointing what is in the blocks, too; see the formulas above.

    BatchNorm's means and variances are a thousandth of it.
    """
    flags = [*FLAGS, "--data", data(), "--batch-size", IMAGES, "--max-steps", 1]
    (done,) = world(1, CHECKPOINTING, *flags, prepare=prepare)
    succeeded(done)
    (kept,) = said(done.out, "kept")
    assert kept == pytest.approx(IMAGES * each, rel=0.01)
    assert round(kept / 1e6, 1) == megabytes
