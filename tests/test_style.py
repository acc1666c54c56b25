"""One style, checked by ruff; what --help says."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, SCRIPTS, forked, succeeded

from bench.backends import installed


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids="_".join)
def test_ruff(command):
    """The settings are in pyproject.toml."""
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_layers():
    """Which modules of bench may import which: the contract is in pyproject.toml."""
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def without_libraries() -> None:
    """Runs in the script's process: a library that is missing can be imported all the same."""
    from unittest.mock import MagicMock

    wanted = "apex horovod.torch accelerate lightning_fabric.strategies deepspeed"
    for name in f"{wanted} nvidia.dali.plugin.pytorch".split():
        parts = name.split(".")
        top = 2 if parts[0] == "nvidia" else 1  # CUDA's wheels are in that package, too
        # To look deeper would import it, in every script's test.
        if not installed(".".join(parts[:top])):
            for end in range(top, len(parts) + 1):
                sys.modules[".".join(parts[:end])] = MagicMock()
    for name in ("oneflow", "flowvision"):  # these have torch's and torchvision's names
        for part in ("", ".nn", ".nn.functional", ".nn.parallel", ".utils.data", ".transforms"):
            sys.modules[name + part] = MagicMock()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script):
    """It says what the script is and how to start it, also without a launcher."""
    done = forked(script, "--help", prepare=without_libraries, COLUMNS=100)
    succeeded(done)
    assert not done.err and f" {script}" in done.out  # the command that starts it
    assert "None" not in done.out and max(map(len, done.out.splitlines())) <= 100
