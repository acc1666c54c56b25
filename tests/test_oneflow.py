"""techniques/oneflow_ddp.py: OneFlow's DDP and its global tensors train what its oracle trains."""

import re
import subprocess

import pytest
from real import ARCH, TEST_IMAGES, lacking
from support import ONEFLOW, ROOT, free_port, refused, succeeded, write_idx

from bench.process import Finished, environment, run
from mistakes.trials import ALONE, no_own_network

FLAGS = ["--arch", ARCH, "--batch-size", 100, "--lr", 0.01]


def in_oneflow(*words) -> Finished:
    """Python in OneFlow's environment."""
    return run([*ALONE, ONEFLOW / "bin" / "python", *words], 300, environment(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five steps an epoch. Of the test images, rank 0 has one batch more than rank 1."""
    if not (ONEFLOW / "bin" / "python").exists():
        lacking("OneFlow not installed: --install installs it")
    if reason := no_own_network():
        lacking(reason)
    return write_idx(tmp_path_factory.mktemp("oneflow"), 500, TEST_IMAGES)


@pytest.fixture(scope="module")
def right(folder) -> list[float]:
    """The losses of two epochs' steps and evaluations."""
    oracle = ["tests/oneflow_oracle.py", "--parts", 2, "--epochs", 2]
    done = in_oneflow(*oracle, "--data", folder, *FLAGS)
    succeeded(done)
    return [float(line) for line in done.out.split()]


@pytest.mark.full
@pytest.mark.parametrize("own", [[], ["--global-tensors"]], ids=["ddp", "global"])
def test_two_processes_train_what_the_oracle_trains(own, folder, right, tmp_path):
    """The second epoch is of another start, from what the first one saved."""
    file, found = tmp_path / "saved", []
    for epoch, more in ((1, ["--save", file]), (2, ["--resume", file])):
        launch = ["-m", "oneflow.distributed.launch", "--nproc_per_node", 2]
        launch += ["--master_port", free_port(), "techniques/oneflow_ddp.py", *own, *more]
        flags = ["--dataset", "fashion-mnist", "--data", folder, *FLAGS, "--epochs", epoch]
        done = in_oneflow(*launch, *flags, "--device", "cpu", "--log-every", 1)
        succeeded(done)
        assert " world_size=2 " in done.out and f" images={TEST_IMAGES} " in done.out
        found += re.findall(r"^(?:train|eval) .* loss=([\d.]+)", done.out, re.M)
    assert len(right) == 12
    assert [float(loss) for loss in found] == pytest.approx(right, rel=1e-6)


def test_the_installer_needs_a_python_3_10(tmp_path):
    """It says so in a line if there is none, and nothing that gets one."""
    for name in ("bash", "dirname", "mktemp"):
        (tmp_path / name).symlink_to(subprocess.check_output(["which", name], text=True).strip())
    script = tmp_path / "bench" / "install_oneflow.sh"  # beside no .venv, which may have uv
    script.parent.mkdir()
    script.write_bytes((ROOT / "bench" / "install_oneflow.sh").read_bytes())
    done = run(["bash", script, tmp_path / "made"], 60, environment(PATH=str(tmp_path)))
    refused(done, "install_oneflow.sh: ", "Python 3.10", "uv", code=2)
