"""The loops in the ancestors' manner, and how the benchmark times them."""

import pytest
import support

from bench import ROOT, cases, records
from bench.__main__ import parse
from bench.host import Host
from bench.ladder import LOOPS
from bench.run import command, gate, schedule

CPU = Host("C", 2)
RIGHT = {"passed": True, "distance": 0.0, "reason": "", "step_seconds": 0.5}
OWN = {name: LOOPS.timed[name].flags for name in ("distribuuuu", "tczhangzhi", "bare")}


@pytest.mark.full
@pytest.mark.parametrize("name", OWN)
def test_the_loops_learn_and_count_their_images(name, tmp_path):
    log = tmp_path / "log.jsonl"
    flags = [*OWN[name], "--dataset", "fashion-mnist", "--data", ROOT / "data"]
    flags += ["--batch-size", 64, "--max-steps", 18, "--log-every", 6, "--log-json", log]
    support.succeeded(*support.world(2, LOOPS.path, *flags))
    start, *trains, end = support.records(log)
    assert (start["event"], start["world_size"], end["event"]) == ("start", 2, "end")
    assert [train["step"] for train in trains] == [6, 12, 18]
    assert all(train["images"] == 6 * 64 and train["seconds"] > 0 for train in trains)
    assert trains[-1]["loss"] < 0.75 * trains[0]["loss"]
    assert name == "bare" or trains[-1]["accuracy"] > 0.2 + trains[0]["accuracy"]


def test_they_are_timed_without_a_gate(tmp_path, monkeypatch):
    """They train other numbers. An epoch is long, since their workers begin anew in each."""
    args = parse(["run", "--techniques", "ancestors,parts", "--dataset", "fashion-mnist"])
    rows = cases.chosen(args, CPU)
    plan, _ = command.make_plan(args, CPU, rows)
    assert plan.images == 200 * 128
    gated = []
    monkeypatch.setattr(gate, "train_cases", lambda own, *_: gated.extend(own) or {})
    monkeypatch.setattr(gate, "judge", lambda *_: dict(RIGHT))
    runner = schedule.Runner(plan, rows, tmp_path, CPU, lambda *_: None)
    runner.gates()
    assert {case.script for case in gated} == {cases.PLAIN, cases.DDP}
    judged = {r["case"]: r for r in records.of(runner.known, "gate")}
    assert judged["bare x2"]["passed"] and judged["bare x2"]["distance"] is None
    found = {case.name: case for case in runner.cases if case.script == LOOPS.path}
    assert len(found) == 7
    for case in found.values():
        assert cases.compared_with(case, rows).ddp == f"{cases.DDP} x2"
        assert runner.step_seconds(case) == 0.5
    words = found["tczhangzhi without sync x2"].command("--seed", 0)
    place = words.index("--manner")
    assert words[place : place + 4] == ["--manner", "tczhangzhi", "--without", "sync"]
