"""Diffs two scripts: what a kind of parallelism costs in code."""

import subprocess

from bench import ROOT


def diff(old: str, new: str) -> str:
    """`diff -u OLD NEW`, without time stamps."""
    command = ["diff", "-u", "--label", old, "--label", new, old, new]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode > 1:
        raise RuntimeError(done.stderr)
    return done.stdout


def counts(text: str) -> tuple[int, int]:
    """The added and the removed lines of a unified diff."""
    lines = text.splitlines()[2:]  # without the two lines that name the files
    return sum(x.startswith("+") for x in lines), sum(x.startswith("-") for x in lines)
