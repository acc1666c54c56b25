"""techniques/amp.py: torch's own mixed precision, what a new project takes in place of Apex."""

import math

import pytest
from real import FLAGS, TEST_IMAGES, numbers, oracle, output
from support import checkpoint, succeeded, world

SCRIPT = "techniques/amp.py"


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def trained(request, tmp_path_factory):
    """The precision, the losses of two processes, and their weights.

    An epoch is enough of fp16, in which a CPU takes fifty times as long for a step.
    """
    weights = tmp_path_factory.mktemp("amp") / "weights.pt"
    flags = [*FLAGS, "--amp", request.param, "--save", weights, *output(f"amp-{request.param}")]
    flags += ["--epochs", 1] if request.param == "fp16" else []
    succeeded(*world(2, SCRIPT, *flags))
    return request.param, numbers(flags), checkpoint(weights)


def test_trains_nearly_what_fp32_trains(trained):
    """The same steps and counts; the first losses differ a little (BatchNorm makes it grow).

    fp16 starts with a scale that overflows: the scaler skips steps until it has found a smaller
    one, and these leave no trace in the optimizer.
    """
    precision, found, _ = trained
    exact = oracle(2)
    assert len(exact) == 8
    exact = exact[:4] if precision == "fp16" else exact
    assert [line[0] for line in found] == [line[0] for line in exact]
    assert all(math.isfinite(line[1]) for line in found)
    assert found[3][0][0] == "eval" and found[3][0][3] == TEST_IMAGES
    assert found[0][1] != exact[0][1]  # else nothing was computed in the lower precision
    alike = 1 if precision == "fp16" else 2
    for (what, loss, _), (_, right, _) in zip(found[:alike], exact[:alike], strict=True):
        assert loss == pytest.approx(right, rel=0.03), what


def test_weights_stay_in_full_precision(trained):
    """The optimizer adds small steps to fp32 weights, and these are saved."""
    import torch

    floats = [value for value in trained[2].values() if value.is_floating_point()]
    assert floats and {value.dtype for value in floats} == {torch.float32}
    assert all(value.isfinite().all() for value in floats)
