"""techniques/amp.py: PyTorch's mixed precision, which a new project uses instead of Apex."""

from functools import partial

import pytest
import torch
from real import EPOCH, TEST_IMAGES, short, train
from support import ORACLE, forked, world

SCRIPT = "techniques/amp.py"


@pytest.mark.full
def test_bf16_trains_what_the_oracle_trains_in_bf16():
    """Bit for bit over ten steps; the weights stay in fp32. The oracle in fp32 has other numbers.

    With small batches: a CPU without bf16 takes some seconds for a step of 256 images.
    """
    flags = [*EPOCH, "--batch-size", 32, "--images", 10 * 32, TEST_IMAGES]
    run = train(partial(world, 2), SCRIPT, *flags)
    oracles = [
        train(forked, ORACLE, *flags, "--parts", 2, "--precision", precision)
        for precision in ("bf16", "fp32")
    ]
    run.equals(oracles[0])
    floats = [value for value in run.weights.values() if value.is_floating_point()]
    assert {value.dtype for value in floats} == {torch.float32}
    assert len(run.losses) == 10 and 1e-5 < abs(run.losses[0] / oracles[1].losses[0] - 1) < 0.03


def test_fp16_skips_steps_as_the_oracle_does():
    """Bit for bit. The scaler begins with a factor that overflows, and skips the first steps."""
    flags = [*short(), "--epochs", 1, "--batch-size", 16, "--images", 64, 20]
    run = train(partial(world, 2), SCRIPT, *flags, "--amp", "fp16")
    run.equals(train(forked, ORACLE, *flags, "--parts", 2, "--precision", "fp16"))
    assert run.saved["scaler"]["scale"] < 2**16
