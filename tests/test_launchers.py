"""python -m bench launchers: what it measures of two launchers, and the table of its records."""

import sys

import pytest
from support import refused

from bench import process
from bench.experiments import launchers
from bench.experiments.launchers import EXCEPTION, HANG, KILLED, LAUNCHER, LAUNCHERS
from bench.process import run


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


def test_mistakes_are_one_line():
    command = [sys.executable, "-m", "bench", "launchers"]
    refused(run([*command, "--out", "a.json"], 60), "--out", code=2)
    refused(run([*command, "--only", "nobody", "--out", "a.jsonl"], 60), "--only", code=2)
