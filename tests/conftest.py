"""pytest's settings: the tests import bench and support; no test may hang.

All but `-m gpu` hide the GPUs, so that they are the same tests everywhere.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import support

# A background job of a shell ignores Ctrl-C, one under nohup the end of its terminal, and so would
# every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser):
    text = "install what tests need: Slurm by apt-get, Horovod into this Python; so does CI=true"
    parser.addoption("--install", action="store_true", help=text)


def pytest_configure(config):
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    support.INSTALL = config.option.install or os.environ.get("CI") == "true"


def pytest_collection_modifyitems(config, items):
    if config.option.markexpr != "gpu":
        with_gpu = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if item not in with_gpu]
        config.hook.pytest_deselected(items=with_gpu)


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> list:
    """The flags for short epochs of real images: 320 to train on, 101 to test on, batches of 64."""
    folder = support.write_idx(tmp_path_factory.mktemp("small"), 320, 101)
    flags = ["--dataset", "fashion-mnist", "--data", folder, "--batch-size", 64]
    return [*flags, "--lr", 0.02, "--epochs", 2, "--log-every", 1, "--device", "cpu"]


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> list:
    """The flags for a small ImageFolder tree: 36 pictures to train on, 18 to test on."""
    folder = support.write_photos(tmp_path_factory.mktemp("photos"))
    flags = ["--dataset", "imagenet", "--data", folder, "--batch-size", 12, "--image-size", 32]
    return [*flags, "--epochs", 2, "--log-every", 1, "--device", "cpu"]
