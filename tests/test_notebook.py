"""The notebook: its cells run in order on a CPU, in a clone."""

import json
import re
import shutil
import sys
from difflib import unified_diff

import pytest
from support import ROOT, write_idx

from bench.process import environment, run

NOTEBOOK = ROOT / "docs" / "learn" / "rungs.ipynb"
LOSS = re.compile(r"^eval epoch=1 loss=(\S+) .* images=101 ", re.M)
ROW = re.compile(r"^(one device|DDP|the mistake) +(\d+) +(\d\.\d+) +(\d+\.\d)%$", re.M)

SCRIPTS = "snsc.py", "mnmc_ddp_launch.py"


def cells(kind: str) -> list[dict]:
    return [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == kind]


def project(folder):
    """A repository with today's files, to clone from."""
    for name in ("bench", "data", "requirements", "techniques"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), ROOT / ".gitignore"]:
        shutil.copy(path, folder)
    git = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "test"]):
        done = run([*git, *words], 60, environment())
        assert done.code == 0, done.err
    return folder


def test_its_links_lead_to_pages():
    links = re.findall(r"\]\(([^)#]+)", "".join("".join(c["source"]) for c in cells("markdown")))
    assert links and [link for link in links if not (NOTEBOOK.parent / link).is_file()] == []


def set_up(cwd, **variables):
    """Runs the first two cells of code, in a folder."""
    settings, cell, *_ = ["".join(c["source"]) for c in cells("code")]
    assert settings.startswith('ADDRESS = ""  #')
    env = environment(1, PYTHON=sys.executable, **variables)
    return run([sys.executable, "-c", f"{settings}\n{cell}"], 120, env, cwd=cwd)


def test_outside_a_clone_it_says_at_once_what_to_fill_in(tmp_path):
    """In one line; nothing was installed or made."""
    done = set_up(tmp_path)
    assert done.code == 1 and done.err.count("\n") == 1 and done.out == ""
    assert done.err.startswith("ADDRESS is empty, and this is no clone: fill it in")
    assert [*tmp_path.iterdir()] == []


def test_ddp_has_two_processes_where_there_is_one_gpu():
    """On the CPU, since one GPU is not enough for two. In a clone, as Jupyter starts it: in the
    notebook's folder.
    """
    pretend = {"PYTHONPATH": str(ROOT / "tests" / "pretend"), "PRETEND_GPUS": "1"}
    done = set_up(NOTEBOOK.parent, CUDA_VISIBLE_DEVICES="0", **pretend)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "GPUs: 1. DDP will use 2 processes on cpu"


@pytest.mark.full
def test_its_cells_run_in_order(tmp_path):
    """From the clone to the plot, with small settings in the first cell. The benchmark, of which
    the last cell shows the result, only lists what it would run.
    """
    settings, *rest, _ = ["".join(c["source"]) for c in cells("code")]
    values = {
        "ADDRESS": project(tmp_path / "project").as_uri(),
        "EPOCHS": 1,
        "DATA": str(write_idx(tmp_path / "small", 512, 101)),
        "BENCHMARK": "--quick --list",
    }
    assert re.findall(r"^(\w+) =", settings, re.M) == list(values)
    given = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    script = tmp_path / "cells.py"
    script.write_text("\n".join([given, *rest]))
    work = tmp_path / "work"
    work.mkdir()
    env = environment(1, PYTHON=sys.executable, MPLBACKEND="agg", FORCE_COLOR="1")  # as Jupyter
    done = run([sys.executable, str(script)], 540, env, cwd=work)
    assert done.code == 0, done.err
    assert "\x1b" not in done.out  # no progress bars

    one, ddp = (float(loss) for loss in LOSS.findall(done.out))
    assert one == pytest.approx(ddp, rel=0.3) and one != ddp  # BatchNorm's batches differ
    assert "+    rank = int(os.environ" in done.out
    steps = {name: int(count) for name, count, *_ in ROW.findall(done.out)}
    assert steps == {"one device": 2, "DDP": 2, "the mistake": 1}
    assert "mnmc_ddp_launch.py x2" in done.out


def shown(cell: dict) -> str:
    """The text that a cell has printed."""
    return "".join("".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream")


def test_its_outputs_are_stored_and_are_those_of_todays_scripts():
    """Of one execution, in order, in which nothing failed; no path of the machine that did it.

    Without those of the benchmark's cells: a notebook's machine is rarely quiet.
    """
    found = cells("code")[:-2]
    assert [c["execution_count"] for c in found] == [*range(1, len(found) + 1)]
    outputs = [output for c in found for output in c["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    text = "".join(map(shown, found))
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/", text)
    scripts = [(ROOT / name).read_text().splitlines() for name in SCRIPTS]
    diff = "\n".join(unified_diff(*scripts, *SCRIPTS, n=1, lineterm=""))
    assert diff in text and ROW.search(text)
