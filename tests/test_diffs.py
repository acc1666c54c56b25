"""The scripts stay comparable: what differs is the parallelism, and the diffs are on file."""

import ast
import re
import subprocess

import pytest
from support import LADDER, ROOT
from update_golden import GOLDEN, golden

from bench.diffs import PAIRS, counts, diff

SECTIONS = [
    "# 0. where this process runs",
    "# 1. model",
    "# 2. data",
    "# 3. optimizer",
    "# 4. train",
    "# 5. evaluate",
    "# 6. finish",
]
OURS = {"bench", "tests", "techniques", "support", *LADDER}
scripts = pytest.mark.parametrize("name", LADDER)
LIMITS = {(old, new): (added, removed) for old, new, added, removed in PAIRS}
pairs = pytest.mark.parametrize("pair", LIMITS, ids="--".join)


def text(name: str) -> str:
    return (ROOT / f"{name}.py").read_text()


def function(source: str, name: str) -> list[str]:
    """The lines of one of its functions."""
    nodes = [node for node in ast.parse(source).body if getattr(node, "name", "") == name]
    (node,) = nodes
    return ast.get_source_segment(source, node).splitlines()


def imports(source: str) -> set[str]:
    """The first words of all that it imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "."}
    return {name.split(".")[0] for name in names}


@pairs
def test_golden_diff(pair):
    """A change of the ladder shows in its diffs: `python tests/update_golden.py`, and look."""
    assert golden(*pair).read_text() == diff(*pair)


def test_no_golden_diff_is_left_over():
    left = {file.name for file in GOLDEN.glob("*.diff")}
    assert left == {golden(*pair).name for pair in LIMITS}


@pairs
def test_lines_changed(pair):
    """A rung costs the reader this many lines, and no more."""
    (added, removed), (most_added, most_removed) = counts(diff(*pair)), LIMITS[pair]
    assert 0 < added <= most_added and 0 < removed <= most_removed


@pairs
def test_our_diff_is_that_of_the_diff_command(pair):
    """The counts are what a reader gets who types `diff -u`."""
    command = ["diff", "-u", *pair]
    theirs = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert counts(theirs) == counts(diff(*pair))


@scripts
@pytest.mark.parametrize("shared", ["load_data", "augment"])
def test_shared_functions_are_equal_to_the_letter(name, shared):
    assert function(text(name), shared) == function(text("snsc"), shared)


@scripts
def test_parse_args_differs_by_appended_flags_only(name):
    """Lines that add flags, and the line that names the flags that may be 0."""
    ours, plain = function(text(name), "parse_args"), function(text("snsc"), "parse_args")
    added = [line for line in ours if line not in plain]
    zero = [line for line in added if line.startswith("        least = 0 if name in (")]
    flags = [line for line in added if re.match(r"    (flags \|= {|add\()", line)]
    assert added == flags + zero
    assert len(ours) == len(plain) + len(flags)
    assert [line for line in ours if line in plain] == [
        line for line in plain if not zero or not line.startswith("        least = ")
    ]


@scripts
def test_sections(name):
    """Each heading once, in order, so that the same number is the same thing in every file."""
    found = [line.strip() for line in text(name).splitlines() if re.match(r"\s*# \d", line)]
    assert found == SECTIONS


@scripts
def test_length(name):
    assert len(text(name).splitlines()) <= 200


@scripts
def test_a_script_stands_alone(name):
    """Copied into another project, it works: nothing of ours is imported."""
    assert not imports(text(name)) & OURS


def test_the_harness_imports_no_script():
    """What times a script cannot change it."""
    for file in (ROOT / "bench").rglob("*.py"):
        assert not imports(file.read_text()) & {*LADDER, "techniques", "tests"}, file
