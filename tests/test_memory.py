"""Techniques that save memory: zero1.py, fsdp.py, custom_optimizer.py, activation_checkpointing.py.

They train what two processes of DDP train, and hold what the formulas on their pages say.
"""

import atexit
import json
import os
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest
import real
import torch
from real import (
    EPOCH,
    FLAGS,
    STEPS,
    Trained,
    data,
    doubles,
    epoch_oracle,
    folder,
    short,
    ten_layers,
    train,
)
from support import ORACLE, forked, full, refused, succeeded, world

from bench.lab.formulas import crossing, states

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
KINDS = "weights", "gradients", "momentum"
CHECKPOINTING = "techniques/activation_checkpointing.py"


def unfused() -> None:
    """Runs in the script's process: SGD without its fused kernel.

    That one rounds the last numbers of a tensor in another way than the others, which do not fill
    a vector. So its result depends on where a weight is cut into shards.
    """
    import torch

    begin = torch.optim.SGD.__init__

    def init(self, *arguments, fused=None, foreach=None, **options):
        begin(self, *arguments, foreach=True, **options)

    torch.optim.SGD.__init__ = init


def watched() -> None:
    """Runs in the script's process: at its end, writes the bytes of what its optimizer refers to.

    Gradients are views of DDP's buckets: memory that tensors share counts once.
    """
    import torch
    from torch.distributed.tensor import DTensor

    begin, end = torch.optim.Optimizer.__init__, torch.distributed.destroy_process_group
    made = []

    def init(self, *rest):
        made.append(self)
        begin(self, *rest)

    def size(tensors):
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        memory = [tensor.untyped_storage() for tensor in local]
        return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())

    def keep():
        weights = [weight for group in made[0].param_groups for weight in group["params"]]
        # ZeroRedundancyOptimizer makes an optimizer for this rank's weights, which has the state.
        states = [value for state in made[-1].state.values() for value in state.values()]
        tensors = weights, [weight.grad for weight in weights], states
        file = Path(os.environ["KEEP"]) / f"{os.environ['RANK']}.json"
        file.write_text(json.dumps(dict(zip(KINDS, map(size, tensors), strict=True))))
        made.clear()
        end()

    torch.optim.Optimizer.__init__, torch.distributed.destroy_process_group = init, keep


def held(place: Path) -> dict[str, list[int]]:
    """Of each kind, the bytes on rank 0, on rank 1 ..."""
    ranks = [json.loads(file.read_text()) for file in sorted(place.glob("*.json"))]
    return {kind: [rank[kind] for rank in ranks] for kind in KINDS}


@cache
def epoch(name: str) -> Trained:
    """An epoch of two processes."""
    return train(partial(world, 2), f"techniques/{name}.py", *EPOCH)


@pytest.mark.parametrize("name", ["zero1", "activation_checkpointing"])
def test_trains_what_the_oracle_trains(name):
    """Bit for bit over an epoch, with BatchNorm's running statistics."""
    assert len(epoch(name).losses) == STEPS
    epoch(name).equals(epoch_oracle(2))


@pytest.mark.full
def test_fsdp_trains_what_the_oracle_trains_with_the_same_kernels():
    """Bit for bit over an epoch. With the oracle's fused kernel the last digit differs in time."""
    fsdp = epoch("fsdp")
    assert len(fsdp.losses) == STEPS
    fsdp.equals(train(forked, ORACLE, *EPOCH, "--parts", 2, prepare=unfused))
    assert fsdp.losses[:10] == pytest.approx(epoch_oracle(2).losses[:10], rel=1e-6)


# The techniques whose ranks do not hold the whole momentum.
SHARDED = {
    "techniques/zero1.py": (),
    "techniques/fsdp.py": (),
    "techniques/hybrid_fsdp.py": (),
    "techniques/custom_optimizer.py": ("--trust", 0, "--schedule", "constant"),
}


# Two epochs of two steps. FSDP's optimizer is slow where there are many tensors: resnet18 has few.
LITTLE = [*FLAGS, "--data", data(), "--image-size", 16, "--images", 128, 32]


@cache
def first_epoch(script: str) -> Path:
    """The checkpoint of two processes after their first epoch."""
    file = folder() / f"first-{Path(script).stem}.pt"
    flags = [*LITTLE, *SHARDED.get(script, ()), "--epochs", 1, "--save", file]
    succeeded(*world(2, script, *flags))
    return file


@cache
def second_epoch(script: str, resume: str | None = None) -> Trained:
    """The last two steps of two epochs, in one go or from another script's first epoch."""
    flags = [*LITTLE, *SHARDED.get(script, ())]
    if resume:
        flags += ["--resume", first_epoch(resume)]
    run = train(partial(world, 2), script, *flags)
    run.records = [line for line in run.records if line.get("epoch") == 2]
    assert [line.get("step") for line in run.records] == [3, 4, None]
    return run


def losses(run: Trained) -> list[float]:
    return [line["loss"] for line in run.records]


@pytest.mark.full
@pytest.mark.parametrize("script", SHARDED)
def test_resumes_with_the_same_digits(script):
    """Weights and momentum, too: rank 0 saves that of all ranks."""
    whole, resumed = second_epoch(script), second_epoch(script, resume=script)
    assert losses(resumed) == losses(whole)
    assert resumed.distance(whole) == 0 and resumed.saved["epoch"] == 2
    found, expected = resumed.saved["optimizer"]["state"], whole.saved["optimizer"]["state"]
    assert found.keys() == expected.keys() and len(expected) == len(list(resumed.weights)) - 60
    for number, state in expected.items():
        assert state["momentum_buffer"].equal(found[number]["momentum_buffer"])
        assert state["momentum_buffer"].abs().sum() > 0


@pytest.mark.full
@pytest.mark.parametrize("script", SHARDED)
def test_its_file_is_as_the_parents_which_resumes_it(script):
    """Names, their order and shapes are the same, and the numbers but for their kernels' rounding,
    which cannot be seen until the second step. So either one resumes the other's file.
    """
    parent = "mnmc_ddp_launch.py"
    mine, theirs = (torch.load(first_epoch(one)) for one in (script, parent))
    assert [*mine] == [*theirs] and [*mine["model"]] == [*theirs["model"]]
    found, expected = mine["optimizer"]["state"], theirs["optimizer"]["state"]
    assert found.keys() == expected.keys()
    pairs = [(value, theirs["model"][name]) for name, value in mine["model"].items()]
    names = "momentum_buffer"
    pairs += [(found[number][names], state[names]) for number, state in expected.items()]
    for one, other in pairs:
        assert type(one) is type(other) and one.dtype == other.dtype
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    there = second_epoch(parent, resume=script)
    assert losses(there) == pytest.approx(losses(second_epoch(script)), rel=1e-5)


# The name, the number of processes, the stage of ZeRO; and the megabytes of what is sharded, as the
# pages say: the least, and the most.
CASES = [
    ("zero1", 2, 1, (22.4, 22.4)),
    ("fsdp", 2, 3, (22.4, 22.4)),
    *full(
        ("zero1", 3, 1, (14.9, 14.9)),
        ("zero1", 4, 1, (11.0, 11.8)),
        ("custom_optimizer", 2, 1, (22.4, 22.4)),
        ("fsdp", 3, 3, (14.8, 15.0)),
    ),
]


@pytest.mark.parametrize("name, size, stage, megabytes", CASES)
def test_each_rank_holds_its_share(name, size, stage, megabytes, tmp_path):
    """What is measured agrees with the formula, and nothing is on no rank."""
    flags = [*FLAGS, "--data", data(), "--image-size", 16, "--epochs", 1]
    flags += ["--batch-size", 4 * size, "--images", 4 * size, 8]
    start = partial(world, size, prepare=watched, KEEP=tmp_path)
    train(start, f"techniques/{name}.py", *flags)
    found = held(tmp_path)
    sharded = []
    for kind, share in zip(KINDS, states(WEIGHTS, (1, 1, 1), stage, size), strict=True):
        assert len(found[kind]) == size
        assert found[kind] == pytest.approx([share] * size, rel=0.15), kind
        assert sum(found[kind]) >= WEIGHTS
        sharded += found[kind] if share < WEIGHTS else []
    assert tuple(round(n / 1e6, 1) for n in (min(sharded), max(sharded))) == megabytes


@pytest.mark.full
def test_fsdp_on_three_ranks_trains_what_the_oracle_trains():
    """In double precision, as the order of three numbers matters. Rows do not divide by 3. Of the
    100 test images, the first rank has 34 in 4 batches, and the others 33 in 3.
    """
    flags = [*LITTLE, "--arch", "resnet10", "--epochs", 1]
    flags += ["--batch-size", 33, "--images", 99, 100]
    three = train(partial(world, 3), "techniques/fsdp.py", *flags, prepare=ten_layers)
    three.equals(train(forked, ORACLE, *flags, "--parts", 3, prepare=ten_layers), rel=1e-10)


def sending() -> None:
    """Runs in the script's process, in double precision, as watched(): prints for each group of
    ranks how many numbers FSDP gives to the collectives of its steps.
    """
    import torch
    import torch.distributed as dist
    from torchvision import models

    doubles()
    watched()
    models.get_model = lambda name, num_classes: models.VisionTransformer(  # vit_tiny
        32, 4, 4, 4, 128, 256, num_classes=num_classes
    )
    sent = Counter()

    def counted(name):
        collective = getattr(dist, name)

        def call(*tensors, group=None, **options):
            if group:  # all ranks exchange only sums of metrics
                numbers = max(
                    x.numel() for x in [*tensors, *options.values()] if torch.is_tensor(x)
                )
                sent[name, *dist.get_process_group_ranks(group)] += numbers
            return collective(*tensors, group=group, **options)

        setattr(dist, name, call)

    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        counted(name)
    atexit.register(lambda: print("sent", json.dumps([[*key, n] for key, n in sent.items()])))


@pytest.mark.full
def test_hybrid_fsdp_holds_a_shard_and_sends_no_weights_between_machines(tmp_path):
    """Two rows of two ranks train what the oracle trains, in double precision; see the formulas.

    A model without BatchNorm, which would make the rounding of four numbers grow over the steps.
    """
    steps, batch = real.STEPS, 32  # with --full 39
    flags = [*FLAGS, "--arch", "vit_tiny", "--epochs", 1, "--batch-size", batch]
    flags += ["--images", steps * batch, 101]
    start = partial(world, 4, prepare=sending, KEEP=tmp_path)
    run = train(start, "techniques/hybrid_fsdp.py", *flags, "--shard-size", 2)
    assert len(run.losses) == steps
    run.equals(train(forked, ORACLE, *flags, "--parts", 4, prepare=doubles), rel=1e-12)
    (line,) = (line for line in run.out.splitlines() if line.startswith("sent"))
    numbers = {(name, *ranks): n for name, *ranks, n in json.loads(line.removeprefix("sent"))}
    # Rank 0 gathers and scatters with its neighbor; with the other row it averages half as much.
    row, column = ("reduce_scatter_single", 0, 1), ("all_reduce", 0, 2)
    assert numbers.keys() == {("all_gather_single", 0, 1), row, column}
    assert numbers[row] == 2 * numbers[column] == steps * (TINY + PADDING)
    assert crossing(8 * TINY, 2, 2) == pytest.approx(8 * numbers[column] / steps, rel=0.02)
    for kind, share in zip(KINDS, states(TINY, (8, 8, 8), 3, 2), strict=True):
        assert held(tmp_path)[kind] == pytest.approx([share] * 4, rel=0.02), kind


@pytest.mark.full
def test_hybrid_fsdp_with_batchnorm_trains_what_the_oracle_trains():
    flags = [*LITTLE, "--arch", "resnet10", "--epochs", 1]
    start = partial(world, 4, prepare=ten_layers)
    run = train(start, "techniques/hybrid_fsdp.py", *flags, "--shard-size", 2)
    run.equals(train(forked, ORACLE, *flags, "--parts", 4, prepare=ten_layers), rel=1e-8)


def initialized() -> None:
    """Runs in the script's process: prints where weights are initialized with random numbers."""
    from torch import nn

    kaiming = nn.init.kaiming_normal_

    def init(tensor, **options):
        print("initialized on", tensor.device.type)
        return kaiming(tensor, **options)

    nn.init.kaiming_normal_ = init


def test_only_rank_0_makes_the_weights_of_fsdp():
    """And in CPU memory: on the others they are without memory, on the meta device."""
    flags = [*FLAGS, "--data", data(), "--image-size", 16, "--batch-size", 4, "--max-steps", 1]
    ranks = world(2, "techniques/fsdp.py", *flags, prepare=initialized)
    succeeded(*ranks)
    found = [{line for line in rank.out.splitlines() if "initialized" in line} for rank in ranks]
    assert found == [{"initialized on meta", "initialized on cpu"}, {"initialized on meta"}]


def counted() -> None:
    """Runs in the script's process: prints the bytes that the first forward keeps for backward.

    Without the model's own; memory that tensors share counts once.
    """
    from torch.autograd.graph import saved_tensors_hooks
    from torch.nn.parallel import DistributedDataParallel

    forward = DistributedDataParallel.forward

    def counting(self, *inputs):
        kept = []
        with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
            result = forward(self, *inputs)
        own = {x.untyped_storage().data_ptr() for x in [*self.parameters(), *self.buffers()]}
        memory = [tensor.untyped_storage() for tensor in kept]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in memory}
        print("kept", sum(size for place, size in sizes.items() if place not in own))
        return result

    DistributedDataParallel.forward = counting


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
    (kept,) = (int(line.split()[1]) for line in done.out.splitlines() if line.startswith("kept"))
    assert kept == pytest.approx(IMAGES * each, rel=0.01)
    assert round(kept / 1e6, 1) == megabytes


def careless() -> None:
    """Runs in the script's process: checkpoint() without the context for its second run."""
    import torch.utils.checkpoint

    checkpoint = torch.utils.checkpoint.checkpoint
    torch.utils.checkpoint.checkpoint = lambda *inputs, context_fn, **more: checkpoint(
        *inputs, **more
    )


def test_the_second_forward_counts_no_batch():
    """Otherwise BatchNorm's running statistics are others, and nothing else is."""
    flags = [*short(), "--epochs", 1, "--images", 64, 32]  # one step
    right = train(partial(world, 1), CHECKPOINTING, *flags)
    wrong = train(partial(world, 1), CHECKPOINTING, *flags, prepare=careless)
    assert right.losses == wrong.losses
    assert right.evaluations[0]["loss"] != pytest.approx(wrong.evaluations[0]["loss"], rel=1e-5)
    for name, value in right.weights.items():
        twice = name.startswith("stage") and ("running_" in name or "num_batches" in name)
        assert value.equal(wrong.weights[name]) != twice, name
        if "num_batches" in name:
            assert value == 1 and wrong.weights[name] == (2 if twice else 1), name


def test_a_model_without_blocks_is_not_checkpointed():
    (done,) = world(1, CHECKPOINTING, *FLAGS, "--data", data(), "--arch", "vgg11")
    refused(done, "--arch vgg11", "resnet18")
