"""python -m bench launchers: what it measures of two launchers, and the table of its records."""

import json
import sys

import pytest
from support import refused

from bench import process
from bench.experiments import launchers
from bench.experiments.launchers import CASES, EXCEPTION, HANG, KILLED, LAUNCHER, LAUNCHERS
from bench.process import run
from docs.make.launchers import outcome, table


@pytest.fixture
def brief(monkeypatch):
    """Ranks that are left are not waited for so long; at the end, none is."""
    monkeypatch.setattr(launchers, "LIMIT", 15.0)
    yield
    assert not process.marked(process.OWNER)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "case", "code", "left", "named"),
    [
        ("mp.spawn", EXCEPTION, 1, 0, "-- Process 1 terminated with the following error:"),
        ("mp.spawn", KILLED, 1, 0, "process 1 terminated with signal SIGKILL"),
        ("mp.spawn", HANG, None, 2, None),
        ("mp.spawn", LAUNCHER, -9, 0, None),
    ],
)
def test_a_launcher(name, case, code, left, named, brief):
    found = launchers.measure(LAUNCHERS[name], case, {})
    assert (found["code"], found["left"]) == (code, left), found
    assert (named in found["names"][0]) if named else not found["names"], found


def test_outcomes_in_words():
    ended = {"code": 1, "launcher_seconds": 2.4, "ranks_seconds": 3.6, "left": 0}
    assert outcome(ended) == "exit 1; 4 s"
    assert (
        outcome(ended | {"code": -9, "ranks_seconds": None, "left": 2}) == "exit 137; 2 ranks left"
    )
    assert outcome(ended | {"code": None, "left": 2}) == "waits; 2 ranks left"
    assert outcome(ended | {"launcher_seconds": 0.2, "ranks_seconds": 0.3}) == "exit 1; at once"
    assert outcome({"skipped": "no port"}) == "no port"


def test_the_table(tmp_path, monkeypatch):
    path = tmp_path / "launchers.jsonl"
    ended = {"code": 1, "launcher_seconds": 2.4, "ranks_seconds": 3.6, "left": 0}
    ended |= {"names": ["rank 1"]}
    lines = [{"launcher": "torchrun", "case": case, **ended} for case in CASES]
    lines.append({"launcher": "mpirun", "case": "all", "skipped": "not installed"})
    first = {"environment": {"cores": 2, "cpu": "C", "gpus": []}, "limit": 45.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in [first, *lines]))
    monkeypatch.setattr("docs.make.launchers.machine", lambda record: "a machine")
    monkeypatch.setattr("docs.make.launchers.link", lambda path: "log")
    text, cells, _, named = table(path)
    assert "mpirun was left out: not installed" in " ".join(text.split())
    assert cells.values.tolist() == [["`torchrun`", *["exit 1; 4 s"] * len(CASES)]]
    assert named.values.tolist() == [["`torchrun`", *["`rank 1`"] * 3]]


def test_mistakes_are_one_line():
    command = [sys.executable, "-m", "bench", "launchers"]
    refused(run([*command, "--out", "a.json"], 60), "--out", code=2)
    refused(run([*command, "--only", "nobody", "--out", "a.jsonl"], 60), "--only", code=2)
