"""Techniques that save memory: zero1.py, fsdp.py, activation_checkpointing.py.

They train what two processes of DDP train, and hold what the formulas on their pages say.
"""

from dataclasses import dataclass

import pytest
from real import FLAGS, compare, numbers, output
from support import ORACLE, checkpoint, forked, records, refused, succeeded, world

WEIGHTS = 4 * 11_181_642  # bytes of resnet18 with ten classes
IMAGES = 32  # of a process in a step
# Bytes that a forward keeps of an image of 32 pixels. In no block: the image, what the first
# convolution and its ReLU give, the numbers of the largest pixels (of 8 bytes), and the last input.
REST = 4 * (3 * 32**2 + 2 * 64 * 16**2 + 512) + 8 * 64 * 8**2
LAYERS = [64 * 8**2, 128 * 4**2, 256 * 2**2, 512]  # numbers in what a block of layer1 ... gives
# There are two blocks in each layer. The input of the first comes from the layer before.
INPUTS = 4 * sum([LAYERS[0], *LAYERS[:3], *LAYERS])
INSIDE = 4 * sum(3 * size for size in LAYERS for _ in range(2))  # two convolutions and a ReLU
INSIDE += 4 * sum(LAYERS[1:])  # a third convolution, where a layer halves the image
INSIDE += 4 * LAYERS[3]  # the result of the last block; the others' are inputs
KINDS = "parameter", "gradient", "optimizer"
# The name, its own flags, and its share of the weights, the gradients and the momentum.
CASES = [
    ("zero1", [], (1, 1, 1 / 2)),
    ("fsdp", [], (1 / 2, 1 / 2, 1 / 2)),
    ("fsdp", ["--cpu-offload"], (1 / 2, 1 / 2, 1 / 2)),
    ("activation_checkpointing", [], (1, 1, 1)),
]


@dataclass
class Trained:
    """Two processes' losses, saved weights and last record; and what they should hold."""

    name: str
    numbers: list[tuple]
    weights: dict
    held: dict
    shares: tuple


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> tuple[list[tuple], dict]:
    """What two processes must compute, and the weights that must come of it."""
    weights = tmp_path_factory.mktemp("exact") / "weights.pt"
    flags = [*FLAGS, *output("memory-exact"), "--parts", 2, "--save", weights]
    succeeded(forked(ORACLE, *flags))
    return numbers(flags), checkpoint(weights)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "".join([case[0], *case[1]]))
def trained(request, tmp_path_factory) -> Trained:
    """A technique at two processes, one after the other."""
    name, own, shares = request.param
    weights = tmp_path_factory.mktemp(name) / "weights.pt"
    flags = [*FLAGS, *own, "--save", weights, *output(f"memory-{name}")]
    succeeded(*world(2, f"techniques/{name}.py", *flags))
    (end,) = records(flags[-1], "end")
    return Trained(name, numbers(flags), checkpoint(weights), end, shares)


def test_trains_what_the_oracle_trains(trained, exact):
    """Losses, hits and weights, with BatchNorm's running averages: to the last bit.

    FSDP's optimizer is another one, that may round in another way.
    """
    lossy = trained.name == "fsdp"
    compare(trained.numbers, exact[0], 1e-5 if lossy else 0)
    assert len(trained.numbers) == 8
    assert trained.weights.keys() == exact[1].keys()
    for name, value in trained.weights.items():
        distance = (value.double() - exact[1][name].double()).abs().max()
        assert distance <= (1e-3 * exact[1][name].abs().max() if lossy else 0), name


def test_each_process_holds_its_share(trained):
    """What is measured agrees with the formula, and nothing is in no process."""
    for kind, share in zip(KINDS, trained.shares, strict=True):
        found = trained.held[f"{kind}_bytes"]
        assert found == pytest.approx([share * WEIGHTS] * 2, rel=0.15), kind
        assert sum(found) >= WEIGHTS


def test_forward_keeps_the_inputs_of_blocks(tmp_path):
    """And without checkpointing what is in the blocks besides; see the formula above.

    BatchNorm's means and variances are a thousandth of it.
    """
    found = {}
    for prepare in (None, plain):
        flags = [*FLAGS, "--max-steps", 1, *output("kept")]
        script = "techniques/activation_checkpointing.py"
        succeeded(*world(2, script, *flags, prepare=prepare))
        (end,) = records(flags[-1], "end")
        found[prepare] = end["activation_bytes"]
    assert found[None] == pytest.approx([IMAGES * (REST + INPUTS)] * 2, rel=0.01)
    assert found[plain] == pytest.approx([IMAGES * (REST + INPUTS + INSIDE)] * 2, rel=0.01)


def plain() -> None:
    """Runs in the script's process: nothing is checkpointed."""
    import torch.utils.checkpoint

    torch.utils.checkpoint.checkpoint = lambda block, *inputs, **_: block(*inputs)


def careless() -> None:
    """Runs in the script's process: checkpoint() without the context for its second run."""
    import torch.utils.checkpoint

    checkpoint = torch.utils.checkpoint.checkpoint
    torch.utils.checkpoint.checkpoint = lambda *inputs, context_fn, **more: checkpoint(
        *inputs, **more
    )


def test_the_second_forward_counts_no_batch(tmp_path):
    """Where it does, BatchNorm's running averages are others, and nothing else is."""
    counts = {}
    for prepare in (None, careless):
        weights = tmp_path / "weights.pt"
        flags = [*FLAGS, "--max-steps", 1, "--save", weights, *output("twice")]
        script = "techniques/activation_checkpointing.py"
        succeeded(*world(1, script, *flags, prepare=prepare))
        counts[prepare] = checkpoint(weights)
    for name, value in counts[None].items():
        averages = name.startswith("layer") and ("running_" in name or "num_batches" in name)
        assert value.equal(counts[careless][name]) != averages, name
        if "num_batches" in name:
            assert value == 1 and counts[careless][name] == (2 if averages else 1), name


def test_a_model_without_blocks_is_not_checkpointed():
    flags = [*FLAGS, "--arch", "vgg11", *output("no-blocks")]
    refused(*world(1, "techniques/activation_checkpointing.py", *flags), "--arch vgg11", "resnet18")
    assert not flags[-1].exists()


@pytest.mark.parametrize(
    "name, size, shared, megabytes",
    [
        ("zero1", 3, ["optimizer"], (14.9, 14.9)),
        ("zero1", 4, ["optimizer"], (11.0, 11.8)),
        ("fsdp", 3, KINDS, (14.8, 15.0)),
    ],
)
def test_more_processes_share_as_well(name, size, shared, megabytes):
    """As much as the pages say, the least and the most of all kinds.

    Also where they have not equally many test images, 34, 34 and 33 in batches of 33: with FSDP all
    must run the model equally often.
    """
    flags = [*FLAGS, "--batch-size", 33 * size, "--max-steps", 1]
    right = [*flags, "--parts", size, *output(f"more-{name}-exact")]
    succeeded(forked(ORACLE, *right))
    flags += output(f"more-{name}")
    succeeded(*world(size, f"techniques/{name}.py", *flags))
    compare(numbers(flags), numbers(right), 1e-5)
    (end,) = records(flags[-1], "end")
    found = [each for kind in shared for each in end[f"{kind}_bytes"]]
    assert found == pytest.approx([WEIGHTS / size] * len(found), rel=0.15)
    assert tuple(round(each / 1e6, 1) for each in (min(found), max(found))) == megabytes
