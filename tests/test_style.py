"""One style, checked by ruff; --help for every flag; a script that causes a warning fails."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, SCRIPTS, STRICT, forked, python, succeeded

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


def test_functions_and_files_are_short():
    """60 lines and 400. The ancestors' loops are one script, as theirs are."""
    made = *ROOT.glob("mistakes/*.py"), *ROOT.glob("docs/make/*.py")
    for path in [*ROOT.glob("bench/**/*.py"), *made]:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        if path.name == "ancestors.py":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno + 1 <= 60, (path, node.name)


def show_the_parser() -> None:
    """Runs in the script's process: its parser prints its flags before it parses. A library that
    is missing can be imported all the same.
    """
    import argparse
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
    parse = argparse.ArgumentParser.parse_args

    def shown(parser, *rest):
        formatter = argparse.HelpFormatter("")
        flags = {
            action.option_strings[-1]: [formatter._expand_help(action), action.default]
            for action in parser._actions
            if action.help  # argparse lists a flag without help by its name
        }
        count = len(parser._actions)
        print(json.dumps([count, flags], default=str), flush=True)
        return parse(parser, *rest)

    argparse.ArgumentParser.parse_args = shown


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script):
    """It says what the script is, how to start it, and a phrase about each flag.

    Also without a launcher. A default that the help names is the default.
    """
    done = forked(script, "--help", prepare=show_the_parser, COLUMNS=100)
    succeeded(done)
    first, _, text = done.out.partition("\n")
    count, flags = json.loads(first)
    assert count == len(flags) >= 14 and not done.err
    assert "None" not in text and "%(" not in text and "==" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert f" {script}" in text  # the command that starts it
    printed = " ".join(text.split())
    for flag, (words, default) in flags.items():
        assert f" {flag}" in text and " ".join(words.split()) in printed
        assert len(re.findall(r"[A-Za-z]{2,}", words)) >= 2, (flag, words)
        claimed = re.search(r"\[([^ \]]+)\]", words)  # one word in brackets is the default
        if claimed and flag != "--help":
            expected = {"None": "none", "False": "off"}.get(str(default), str(default))
            assert claimed[1] == expected, (flag, words)


CAUSES = {
    "ours": "warnings.warn_explicit('ours', FutureWarning, 'file', 1, module='__main__')",
    "torch's": "warnings.warn_explicit('not ours', FutureWarning, 'file', 1, module='torch.some')",
}


@pytest.mark.parametrize("cause, code", [("ours", 1), ("torch's", 0)])
def test_a_warning_of_the_scripts_own_is_an_error_in_these_tests(cause, code, tmp_path):
    """`forked` runs every script like this. A library's warning is not the script's."""
    script = tmp_path / "warns.py"
    script.write_text(f"import warnings\n{CAUSES[cause]}\n")
    for finished in (forked(str(script)), python(script, PYTHONWARNINGS=STRICT)):
        assert finished.code == code and "ours" in finished.err
