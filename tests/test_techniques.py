"""techniques/: grad_accum.py trains what the oracle trains; channels_last.py and compile.py train
the same numbers by other kernels. amp.py has test_amp.py.
"""

import pytest
from real import FLAGS, TEST_IMAGES, numbers, output
from support import ORACLE, checkpoint, forked, refused, succeeded, world
from test_equality import doubles

ACCUMULATE = "techniques/grad_accum.py"


def accumulated(script: str, *more) -> tuple[list[tuple], list[tuple], dict]:
    """The steps, the evaluations and the weights of a run in one process."""
    name = f"{script.replace('/', '-')}-{'-'.join(map(str, more))}"
    flags = output(name)
    weights = flags[-1].with_suffix(".pt")
    succeeded(forked(script, *FLAGS, *more, "--save", weights, *flags))
    found = numbers(flags)
    steps = [line for line in found if line[0][0] == "train"]
    return steps, [line for line in found if line[0][0] == "eval"], checkpoint(weights)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_batch_in_parts_trains_what_the_oracle_trains(parts):
    """Bit for bit: each part is forward and backward by itself, then there is one step.

    BatchNorm's running averages are not those of data-parallel processes, which keep the first
    part's: here each part updates them. So what is evaluated differs a little, and is not trained.
    """
    steps, evaluations, weights = accumulated(ACCUMULATE, "--accum-steps", parts)
    split = ["--parts", parts, "--split", "contiguous"]
    right, others, exact = accumulated(ORACLE, *split)
    assert steps == right and len(steps) == 6
    assert [line[0] for line in evaluations] == [line[0] for line in others]
    assert evaluations != others
    for name, value in weights.items():
        averages = "running_" in name or "num_batches" in name
        assert value.equal(exact[name]) != averages, name


def test_a_batch_in_one_part_is_trained_as_ever():
    """Nothing else is different in it."""
    one, plain = accumulated(ACCUMULATE, "--accum-steps", 1), accumulated("snsc.py")
    assert one[:2] == plain[:2]
    assert all(value.equal(plain[2][name]) for name, value in one[2].items())


@pytest.mark.parametrize("parts, word", [(3, "--accum-steps"), (64, "--accum-steps"), (0, "0")])
def test_parts_that_do_not_fit(parts, word):
    """64 images in 3 parts, in parts of one image, in none."""
    flags = output("unfit")
    refused(forked(ACCUMULATE, *FLAGS, "--accum-steps", parts, *flags), word)
    assert not flags[-1].exists()


@pytest.fixture(scope="module")
def exact() -> list[tuple]:
    """What two processes must compute, in double precision: there other kernels show no rounding
    that BatchNorm could make grow.
    """
    flags = [*FLAGS, *output("exact"), "--parts", 2]
    succeeded(forked(ORACLE, *flags, prepare=doubles))
    return numbers(flags)


def train(script: str, *more, **env) -> list[tuple]:
    """The records of two processes, in double precision."""
    flags = [*FLAGS, *more, *output(script.replace("/", "-"))]
    succeeded(*world(2, script, *flags, prepare=doubles, **env))
    return numbers(flags)


def compare(found: list[tuple], exact: list[tuple]) -> None:
    """The same steps and counts, losses to 1e-9, every hit; in each evaluation every image once."""
    assert [line[0] for line in found] == [line[0] for line in exact]
    assert {line[0][3] for line in found if line[0][0] == "eval"} == {TEST_IMAGES}
    for (what, loss, accuracy), (_, right, hits) in zip(found, exact, strict=True):
        assert loss == pytest.approx(right, rel=1e-9) and accuracy == hits, what


def test_channels_last_trains_the_same_numbers(exact, tmp_path):
    """The layout is seen in the weights that it saves."""
    import torch

    weights = tmp_path / "weights.pt"
    compare(train("techniques/channels_last.py", "--save", weights), exact)
    convolutions = [v for v in checkpoint(weights).values() if v.ndim == 4 and v.shape[2] > 1]
    assert len(convolutions) == 17
    for value in convolutions:
        assert value.is_contiguous(memory_format=torch.channels_last)
        assert not value.is_contiguous()


def test_compile_trains_the_same_numbers(exact, tmp_path):
    """That anything was compiled is seen in the cache of the kernels."""
    cache, weights = tmp_path / "cache", tmp_path / "weights.pt"
    flags = ["--save", weights]
    compare(train("techniques/compile.py", *flags, TORCHINDUCTOR_CACHE_DIR=cache), exact)
    assert [*cache.rglob("*.so")]
    checkpoint(weights)  # its names are those of the model, not of its compiled wrapper


def test_compile_without_a_compiler():
    """A line, before a minute is spent."""
    for process in world(1, "techniques/compile.py", *FLAGS, *output("no-compiler"), CXX="/no/g++"):
        refused(process, "CXX", "install g++")
