"""channels_last.py and compile.py train the same numbers by other kernels.

In double precision: there, other kernels show no rounding that BatchNorm could amplify.
"""

from functools import partial

import pytest
from real import FLAGS, data, doubles, exact_oracle, short, small_models, train
from support import ORACLE, forked, world


def test_channels_last_trains_the_same_numbers():
    """The layout is seen in the weights that it saves."""
    run = train(partial(world, 2), "techniques/channels_last.py", *short(), prepare=doubles)
    run.equals(exact_oracle(2), rel=1e-8)
    assert any(not value.is_contiguous() for value in run.weights.values())


@pytest.mark.full
def test_compile_trains_the_same_numbers(tmp_path):
    """That anything was compiled is seen in the cache of the kernels. Names in the file are the
    model's, not the compiled wrapper's: train() loads it into a plain model.
    """
    flags = [*FLAGS, "--data", data(), "--epochs", 1, "--image-size", 16, "--arch", "one_layer"]
    flags += ["--images", 192, 64]  # batches of one size: another one would be compiled anew
    exact = train(forked, ORACLE, *flags, "--parts", 2, prepare=small_models)
    cache = {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache", "TORCHINDUCTOR_COMPILE_THREADS": 1}
    run = train(partial(world, 2), "techniques/compile.py", *flags, prepare=small_models, **cache)
    run.equals(exact, rel=1e-8)
    assert [*tmp_path.rglob("*.so")]
