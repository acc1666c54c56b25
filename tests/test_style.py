"""One style, checked by ruff; and a script that causes a warning fails."""

import subprocess
import sys

import pytest
from support import ROOT, STRICT, forked


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids="_".join)
def test_ruff(command):
    """The settings are in pyproject.toml."""
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("words, code", [("ours", 1), ("torch's", 0)])
def test_a_warning_of_the_scripts_own_is_an_error_in_these_tests(words, code, tmp_path):
    """`forked` runs every script so; a library's warning about itself is not the script's."""
    script = tmp_path / "warns.py"
    module = "__main__" if words == "ours" else "torch.somewhere"
    call = f"warn_explicit({words!r}, FutureWarning, 'file', 1, module={module!r})"
    script.write_text(f"import warnings\nwarnings.{call}\n")
    finished = forked(str(script))
    assert finished.code == code and words in finished.err


def test_the_same_holds_for_launched_scripts():
    """What test_equality gives to torchrun and to the script that spawns, as PYTHONWARNINGS."""
    code = "import warnings; warnings.warn('ours', FutureWarning)"
    env = {"PYTHONWARNINGS": STRICT}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "FutureWarning: ours" in done.stderr
