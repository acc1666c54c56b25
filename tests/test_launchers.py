"""python -m bench launchers: what it measures of a launcher."""

import socket
import sys

import pytest
from support import refused

from bench import process
from bench.experiments import launchers
from bench.experiments.launchers import HANG, KILLED, LAUNCHERS
from bench.process import run


@pytest.mark.full
def test_a_rank_that_hangs_stays(monkeypatch):
    """It is measured, and then ended."""
    monkeypatch.setattr(launchers, "LIMIT", 3.0)
    found = launchers.measure(LAUNCHERS["mp.spawn"], HANG, {})
    assert found.get("left") == 2 and found["code"] is None and not found["names"], found
    assert not process.marked(process.OWNER)


@pytest.mark.full
def test_a_killed_rank_is_named_and_a_port_that_was_taken_is_changed(monkeypatch):
    """By another program, between free_port() and the ranks' start."""
    with socket.create_server(("", 0)) as other:
        ports = iter([other.getsockname()[1], launchers.free_port()])
        monkeypatch.setattr(launchers, "free_port", lambda: next(ports))
        found = launchers.measure(LAUNCHERS["mp.spawn"], KILLED, {})
    assert (found.get("code"), found.get("left")) == (1, 0), found
    assert "process 1 terminated with signal SIGKILL" in found["names"][0]
    assert not process.marked(process.OWNER)


def test_mistakes_are_one_line():
    command = [sys.executable, "-m", "bench", "launchers"]
    refused(run([*command, "--out", "a.json"], 240), "--out", code=2)
