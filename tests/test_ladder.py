"""bench/ladder.py: a technique is a script, an entry there and a page.

`pytest tests/test_ladder.py -k NAME` runs what holds for each script: also the tests of other files
that are imported here.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from test_diffs import (  # noqa: F401
    test_a_model_that_is_nan_has_no_accuracy,
    test_a_plain_script_says_nothing_of_processes_that_work_together,
    test_a_script_has_its_parents_flags_and_then_its_own,
    test_a_script_stands_alone,
    test_functions_that_the_parallelism_does_not_touch_are_equal_to_the_letter,
    test_sections,
)
from test_equality import test_it_trains_what_the_oracle_trains  # noqa: F401
from test_pieces import test_its_page_is_up_to_date  # noqa: F401
from test_style import test_help  # noqa: F401

from bench.ladder import SCRIPTS
from bench.process import environment, run
from mistakes.found import causes
from mistakes.outcomes import FOLDER, read

ENTRY = """\
    Script(
        "techniques/made_up.py",
        functions="main",
        timed={"made up": Timed("memory")},
        equality=(),
    ),
"""
PAGE = """\
# A made-up technique: techniques/made_up.py

<!-- begin outcomes -->
<!-- end outcomes -->

<!-- diff mnmc_ddp_launch.py techniques/made_up.py -->

<!-- piece all: -\"""Train an image classifier
skip: nothing here is run
-->
<!-- end all -->
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_its_first_lines_say_how_to_start_it(script):
    """With the launcher that the registry names."""
    launcher = SCRIPTS[script].launcher.replace("oneflow", "oneflow.distributed.launch")
    words = ast.get_docstring(ast.parse((ROOT / script).read_text()))
    commands = [line for line in words.splitlines() if script in line and launcher in line]
    assert commands


@pytest.mark.parametrize("script", SCRIPTS)
def test_its_silent_mistakes_are_in_the_list_of_causes(script):
    """mistakes/causes.toml, by which it is judged what audit.py finds."""
    page = Path(script).stem
    outcomes = read(FOLDER).get(page, {}).items()
    silent = {name for name, outcome in outcomes if outcome["kind"] == "silent"}
    assert silent <= causes().get(page, {}).keys()


@pytest.mark.full
def test_a_made_up_technique_touches_three_files(tmp_path):
    """In a copy of the project. The generated parts follow from a command, and the tests that hold
    for all scripts, the cases and the pages know it.
    """
    names = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", ":!logs/**.png")
    listed = subprocess.run(names, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    script = (ROOT / "techniques" / "zero1.py").read_text().replace("zero1.py", "made_up.py")
    (tmp_path / "techniques" / "made_up.py").write_text(script)
    registry = tmp_path / "bench" / "ladder.py"
    head, end, rest = registry.read_text().partition("]\n# No part")
    registry.write_text(head + ENTRY + end + rest)
    (tmp_path / "docs" / "diffs" / "made_up.md").write_text(PAGE)

    def python(*words: str) -> str:
        done = run([sys.executable, *words], 300, environment(1, COLUMNS="200"), cwd=tmp_path)
        assert done.code == 0, done.out + done.err
        return done.out

    python("-m", "mistakes", "measure")
    python("-m", "docs.make")
    assert "made up x2" in python("-m", "bench", "run", "--list", "--techniques", "memory")
    tests = "tests/test_ladder.py", "-k", "made_up and not made_up_technique"
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert " passed" in said
    assert "[made_up.py](made_up.py)" in (tmp_path / "techniques" / "README.md").read_text()
