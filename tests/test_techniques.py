"""techniques/channels_last.py and compile.py: the same numbers by other kernels.

grad_accum.py is what all equality tests compare with; amp.py has test_amp.py.
"""

import pytest
from real import FLAGS, TEST_IMAGES, numbers, output
from support import ORACLE, ROOT, forked, refused, succeeded, world
from test_diffs import function
from test_equality import doubles

SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("techniques/*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("shared", ["load_data", "augment"])
def test_shared_functions_are_equal_to_the_letter(script, shared):
    plain = function((ROOT / "snsc.py").read_text(), shared)
    assert function((ROOT / script).read_text(), shared) == plain


@pytest.fixture(scope="module")
def exact() -> list[tuple]:
    """What two processes must compute, in double precision: there other kernels show no rounding
    that BatchNorm could make grow.
    """
    flags = [*FLAGS, *output("exact"), "--accum-steps", 2]
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
    convolutions = [v for v in torch.load(weights).values() if v.ndim == 4 and v.shape[2] > 1]
    assert len(convolutions) == 17
    for value in convolutions:
        assert value.is_contiguous(memory_format=torch.channels_last)
        assert not value.is_contiguous()


def test_compile_trains_the_same_numbers(exact, tmp_path):
    """That anything was compiled is seen in the cache of the kernels."""
    compare(train("techniques/compile.py", TORCHINDUCTOR_CACHE_DIR=tmp_path), exact)
    assert [*tmp_path.rglob("*.so")]


def test_compile_without_a_compiler():
    """A line, before a minute is spent."""
    for process in world(1, "techniques/compile.py", *FLAGS, *output("no-compiler"), CXX="/no/g++"):
        refused(process, "CXX", "install g++")
