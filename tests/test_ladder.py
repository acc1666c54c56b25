"""bench/ladder.py: a technique is a script, an entry there and a page."""

import subprocess
import sys

import pytest
from support import ROOT

from bench.process import environment, run

ENTRY = """\
    Script(
        "techniques/made_up.py",
        functions="main",
        timed={"made up": Timed("memory")},
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
    python("-m", "mistakes", "measure", "--check")
    assert "made up x2" in python("-m", "bench", "run", "--list", "--techniques", "memory")
    tests = [f"tests/test_{name}.py" for name in ("diffs", "style")]
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", "made_up")
    assert " passed" in said
    assert "[made_up.py](made_up.py)" in (tmp_path / "techniques" / "README.md").read_text()
