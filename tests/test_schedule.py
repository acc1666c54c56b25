"""The blocks of a run: what fits into a budget, in which order, and what a failure leaves."""

import os
import re
import signal
import sys
import threading
from collections import Counter
from dataclasses import asdict, replace

import pytest
from support import ROOT, fake_ladder, forked, succeeded, wait_until

from bench import cases, process, records, stats
from bench.__main__ import parse
from bench.host import Gpu, Host
from bench.process import Failed
from bench.run import command, gate, schedule, timing
from bench.run.resident import Resident
from bench.show import summary

CPU = Host("C", 2, memory_gib=16.0)
V100 = Gpu("Tesla V100-SXM2-16GB", (7, 0))
# Seconds from the launcher's start to the first step, as gates measured them on two cores.
STARTS = {"python": 4.2, "torchrun": 6.0, "srun": 8.7, "horovodrun": 7.5, "mnmc_ddp_mp.py": 9.0}
ENVIRONMENT = {"cpu": "C", "cores": 2, "gpus": [], "versions": {"torch": "2.15.0"}}


def start_seconds(case: cases.Case) -> float:
    """From a launcher's start to the first step."""
    return STARTS.get(case.script, STARTS[case.launcher]) if case.world > 1 else 5.0


class Pretended(schedule.Runner):
    """A run whose blocks take the time that they would, by a clock that is set, not waited for."""

    clock = 0.0
    starting = 1.0  # how many times as long as on two CPU cores a start takes

    def spend(self, seconds: float) -> None:
        Pretended.clock += seconds

    def note(self, kind, **fields):
        self.known.append({"kind": kind, **fields})

    def measured(self, block: int, turns: int) -> None:
        for _ in range(turns):
            round_ = self.last("round") + 1
            for case in self.cases:
                odd = (len(case.name) * round_) % 7
                windows = [{"step": 9, "seconds": 0.8, "images": 1000 + odd}]
                windows[0] |= {"data_seconds": 0.0}
                about = {"block": block, "round": round_, "warm_up": 5, "windows": windows}
                about |= {"begin": Pretended.clock, "conditions": {}}
                self.note("sample", **{"case": case.name} | about)

    def block(self, number):
        together = self.at_once(number) > 1
        start = sum(map(start_seconds, self.cases)) * (1.9 / 2 if together else 1.2)
        # Seconds of a turn of 12 cases, measured on two cores.
        self.round_cost = 17.8 / 12 * len(self.cases)
        self.spend(start + self.turns * self.round_cost)
        self.measured(number, self.turns)

    def launches(self, number):
        # A later block may take longer than the first.
        slower = self.starting * (1 + 0.2 * (number > 1))
        seconds = sum(start_seconds(case) for case in self.cases) * slower
        seconds += 7.0 * len(self.cases)  # 5 s of steps, an end
        self.spend(seconds)
        self.measured(number, 1)


def blocks(run: Pretended) -> int:
    return max(r["block"] for r in records.of(run.known, "sample"))


def pretended(monkeypatch, host: Host, *flags: str, gates: float, without=()) -> Pretended:
    """A run of the default plan, its gates included, that has ended; gates: seconds for a case."""
    monkeypatch.setattr(schedule.time, "monotonic", lambda: Pretended.clock)
    monkeypatch.setattr(schedule, "free_mib", lambda host: 1e6)
    args = parse(["run", "--dataset", "cifar10", *flags])
    rows = [case for case in cases.chosen(args, host) if case.script not in without]
    plan, _ = command.make_plan(args, host, rows)
    Pretended.clock = 0.0
    runner = Pretended(plan, rows, ROOT / "nowhere", host, lambda *_: None)
    about = ENVIRONMENT | {"gpus": host.gpu_names}
    recorded = [
        asdict(case) | {"precision": case.precision(host), "threads": case.threads(host)}
        for case in rows
    ]
    setting = {"plan": asdict(plan), "cases": recorded}
    runner.note("setting", **setting, environment=about)
    for case in rows:
        more = {"step_seconds": 0.26, "start": {"startup_seconds": start_seconds(case)}}
        more["end"] = {"peak_memory_mib": 1100.0}
        runner.note("gate", case=case.name, passed=True, distance=0.0, **more)
    runner.spend(gates * len(rows))
    runner.measure()
    return runner


@pytest.mark.parametrize(("gpus", "least"), [(0, 7), (8, 6)])
def test_the_default_run_has_blocks_enough_for_claims(gpus, least, monkeypatch):
    """In 14 minutes of the 15 on two cores; in an hour on 8 GPUs, if a start takes as long there as
    on two cores. The next test has slower ones.
    """
    host = replace(CPU, cores=max(2, 8 * gpus), gpus=(V100,) * gpus)
    without = () if gpus else ("mnmc_apex.py",)
    run = pretended(monkeypatch, host, gates=15 if gpus else 7, without=without)
    assert blocks(run) >= least and Pretended.clock <= (3600 if gpus else 14 * 60)
    rows = summary.by_case(run.known)
    assert {row["claim"] for row in rows} <= {None, "no clear difference"}
    stop = run.known[-1]
    assert stop["kind"] == "stop" and "budget" in stop["reason"]


@pytest.mark.parametrize("flags", [(), ("--budget", "60")])
def test_starts_on_gpus_may_take_long(flags, monkeypatch, capsys):
    """CUDA, NCCL and a shared disk, which nobody has measured here: without --budget there are six
    blocks all the same, and how long they take is said.
    """
    monkeypatch.setattr(Pretended, "starting", 5)
    host = replace(CPU, cores=64, gpus=(V100,) * 8)
    run = pretended(monkeypatch, host, *flags, gates=75)
    said = re.findall(
        r"the 6 blocks that a claim takes need (\d+) minutes more", capsys.readouterr().err
    )
    if flags:
        assert not said and (Pretended.clock <= 3600 or blocks(run) == 1)
    else:
        assert blocks(run) == stats.FEWEST
        assert 60 * int(said[0]) < Pretended.clock < 1.4 * 60 * int(said[0]) + 75 * 60


@pytest.fixture
def gated_fakes(tmp_path, monkeypatch):
    """Runs fakes instead of scripts, with their gates: gated_fakes(*names, blocks=2)."""
    monkeypatch.setattr(cases, "ROOT", fake_ladder(tmp_path / "ladder"))
    plain = cases.Case(cases.PLAIN, "snsc.py", "python", 1)

    def measure(*names: str, blocks: int = 2, folder=tmp_path / "out"):
        plan = timing.Plan("fashion-mnist", "data", 256, 4, "resnet18", 0, True, 600.0, blocks)
        rows = [plain, replace(plain, name=cases.AGAIN)]
        rows += [cases.Case(name, f"{name}.py", "python", 1) for name in names]
        if not folder.exists():
            folder.mkdir()
            about = schedule.make_setting(plan, rows, "fakes", CPU, dict(ENVIRONMENT))
            records.append(folder, "setting", **about)
        runner = schedule.Runner(plan, list(rows), folder, CPU, lambda *_: None)
        runner.gates()
        try:
            runner.measure()
        finally:
            assert not process.marked(process.OWNER)
        return folder

    return measure


@pytest.fixture
def fakes(gated_fakes, monkeypatch):
    """The same, each passed by its gate, which trains nothing."""
    passed = {"passed": True, "distance": 0.0, "reason": "", "step_seconds": 0.5}
    passed |= {"start": {"startup_seconds": 0.1}, "end": {"peak_memory_mib": 100.0}}
    monkeypatch.setattr(gate, "train_cases", lambda *_: {})
    monkeypatch.setattr(gate, "judge", lambda *_: dict(passed))
    return gated_fakes


def test_a_case_that_is_wrong_crashes_or_diverges_gets_a_reason_and_no_speed(gated_fakes):
    """Never a number from a failed run, never a silent row."""
    found = summary.by_case(records.read(gated_fakes("good", "wrong", "nan", "crash"))[0])
    rows = {row["case"]: row for row in found}
    assert rows["good"]["images_per_second"] == pytest.approx(512)
    assert rows["good"]["ratio"] == pytest.approx(1)
    reasons = {"wrong": "wrong numbers", "nan": "wrong numbers", "crash": "exit code 1: "}
    for name, reason in reasons.items():
        assert reason in rows[name]["status"]
        assert not any(rows[name][key] for key in ("rounds", "images_per_second", "ratio"))
    assert "planted crash" in rows["crash"]["status"]


def test_gates_that_ended_before_the_run_was_cut_off_are_kept(gated_fakes, monkeypatch, tmp_path):
    """And those that the end of the run has ended have not failed."""
    real = process.launch

    def launch(command, env, limit):
        if any(word.endswith("/b.py") for word in command):
            wait_until(lambda: (tmp_path / "out" / records.NAME).read_text().count('"gate"') > 1)
            raise KeyboardInterrupt
        return real(command, env, limit)

    monkeypatch.setattr(process, "launch", launch)
    with pytest.raises(KeyboardInterrupt):
        gated_fakes("a", "b", "hang")
    known = records.of(records.read(tmp_path / "out")[0], "gate")
    assert {gate_["case"]: gate_["passed"] for gate_ in known} == {cases.PLAIN: True, "a": True}
    monkeypatch.setattr(process, "launch", real)
    rows = {row["case"]: row for row in summary.by_case(records.read(gated_fakes("a", "b"))[0])}
    assert rows["a"]["blocks"] == rows["b"]["blocks"] == 2


def test_each_block_has_every_case_once_in_an_order_drawn_anew(fakes):
    """The order is logged, and snsc.py is there twice; --resume goes on with the next."""
    fakes("good", blocks=3)
    samples = records.of(records.read(fakes("good", blocks=5))[0], "sample")
    orders = []
    for block in range(1, 6):
        mine = [s for s in samples if s["block"] == block]
        assert sorted(s["case"] for s in mine) == sorted(["good", cases.AGAIN, cases.PLAIN])
        assert [(s["round"], s["order"]) for s in mine] == [(block, place) for place in range(3)]
        orders.append(tuple(s["case"] for s in mine))
    assert len(set(orders)) > 1 and len(samples) == 15


def test_a_quick_run_times_first_what_a_cut_would_be_missed_most(fakes, monkeypatch, tmp_path):
    """In the table's order, the control last; cut off and resumed, those that were not timed."""
    real, left = process.launch, [4]

    def launch(command, env, limit):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(command, env, limit)

    monkeypatch.setattr(process, "launch", launch)
    with pytest.raises(KeyboardInterrupt):
        fakes(*"abcde")
    left[0] = 9
    fakes(*"abcde")
    samples = records.of(records.read(tmp_path / "out")[0], "sample")
    order = [(sample["block"], sample["case"]) for sample in samples]
    assert order[:4] == [(1, cases.PLAIN), (1, "a"), (1, "b"), (1, "c")]
    assert order[4:11] == [
        (2, name) for name in (cases.PLAIN, "d", "e", "a", "b", "c", cases.AGAIN)
    ]


def test_a_case_that_fails_later_is_a_row_with_its_reason(fakes, monkeypatch):
    """It gets no speed, not even from the block before; the others' blocks go on without it."""
    real, seen = process.launch, Counter()

    def launch(command, env, limit):
        seen[command[2]] += 1
        if "late.py" in command[2] and seen[command[2]] > 1:
            raise Failed("exit code 1: out of memory")
        return real(command, env, 2 if "hang.py" in command[2] else limit)

    monkeypatch.setattr(process, "launch", launch)
    known = records.read(fakes("crash", "hang", "late", "good", blocks=3))[0]
    rows = {row["case"]: row for row in summary.by_case(known)}
    reasons = {"crash": "planted crash", "hang": "killed after 2 s", "late": "out of memory"}
    for name, reason in reasons.items():
        assert reason in rows[name]["status"] and rows[name]["images_per_second"] is None
    assert rows["good"]["blocks"] == 3 and rows["good"]["ratio"] == pytest.approx(1)
    assert sorted(r["block"] for r in records.of(known, "failure")) == [1, 1, 2]


def test_when_snsc_fails_the_run_ends_and_keeps_what_it_has(fakes, monkeypatch, tmp_path):
    """Here in its third launch."""
    real, seen = process.launch, Counter()

    def launch(command, env, limit):
        script = command[2]
        seen[script] += 1
        if seen[script] > 4 and "snsc.py" in script:  # twice a block, with its control
            raise Failed("exit code 1: out of memory")
        return real(command, env, limit)

    monkeypatch.setattr(process, "launch", launch)
    monkeypatch.setattr(schedule.Runner, "order", lambda self, *_: list(self.cases))
    with pytest.raises(Failed, match=r"snsc.py failed in block 3: .*out of memory"):
        fakes("good", blocks=9)
    known = records.read(tmp_path / "out")[0]
    assert known[-1]["kind"] == "stop" and "out of memory" in known[-1]["reason"]
    rows = {row["case"]: row for row in summary.by_case(known)}
    assert rows[cases.PLAIN]["blocks"] == rows["good"]["blocks"] == 2
    assert rows["good"]["ratio"] == pytest.approx(1)


# Stands in for the probe of a script that stays started: a step takes 10 ms, an epoch has 30.
STAYS = """
import argparse, json, time
parser = argparse.ArgumentParser()
parser.add_argument("--log-json")
parser.add_argument("--log-every", type=int)
args, _ = parser.parse_known_args()
def log(**fields):
    with open(args.log_json, "a") as file:
        file.write(json.dumps(fields) + chr(10))
log(event="start", time=time.time())
last = 0
for step in range(1, 100_000):
    time.sleep(0.01)
    if step % 30 % args.log_every == 0 or step % 30 == 0:
        count, last = step - last, step
        about = {"epoch": 1 + step // 30, "loss": 1.0, "images": 8 * count, "data_seconds": 0.0}
        log(event="train", step=step, seconds=0.01 * count, **about)
"""


def test_cases_that_stay_started_take_turns_in_each_block(fakes, tmp_path, monkeypatch):
    """Started anew in each; a turn has its steps, wherever an epoch ends."""
    (tmp_path / "ladder" / cases.PROBE).write_text(STAYS)
    plan = timing.Plan
    monkeypatch.setattr(timing, "Plan", lambda *values: plan(*values, precise=True))
    monkeypatch.setattr(schedule, "free_mib", lambda host: 1e6)
    known = records.read(fakes("good", blocks=2))[0]
    launches, samples = records.of(known, "launch"), records.of(known, "sample")
    assert Counter((r["case"], r["block"]) for r in launches) == dict.fromkeys(
        [(case, block) for case in ("good", cases.PLAIN, cases.AGAIN) for block in (1, 2)], 1
    )
    turns = Counter((s["case"], s["block"]) for s in samples)
    assert set(turns.values()) == {timing.TURNS} and len(turns) == 6
    for number in {s["round"] for s in samples}:
        mine = [s for s in samples if s["round"] == number]
        assert sorted(s["order"] for s in mine) == [0, 1, 2]
        assert len({s["block"] for s in mine}) == 1
    sizes = {1: 1, 2: 25}  # of a window: the gate says half a second a step, the first block 10 ms
    for sample in samples:
        steps = sample["windows"][-1]["step"] - sample["warm_up"]
        size = timing.TURN_WINDOWS * sizes[sample["block"]]
        assert size <= steps <= size + 30
        assert sample["memory_mib"] > 5
    rows = {row["case"]: row for row in summary.by_case(known)}
    assert rows["good"]["ratio"] == pytest.approx(1) and rows["good"]["blocks"] == 2
    assert rows["good"]["startup_seconds"] is None  # two started at once


GROUPS = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist

def main():
    rendezvous = {"init_method": f"file://{sys.argv[1]}", "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", timeout=timedelta(seconds=5), **rendezvous)
    for group in (dist.group.WORLD, dist.new_group([0])):
        print(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())

if __name__ == "__main__":
    main()
"""


def test_a_case_that_sleeps_has_no_timeout_of_minutes(tmp_path):
    """NCCL's watchdog would end a case that has slept for ten with a collective in flight; some
    libraries set a timeout of their own.
    """
    script = tmp_path / "groups.py"
    script.write_text(GROUPS)
    case = Resident("a case", [sys.executable], tmp_path, {})
    flags = [word for word in case.command if word == "--patient"]
    done = forked(str(script), tmp_path / "store", *flags)
    succeeded(done)
    assert [float(line) for line in done.out.split()] == [86_400, 86_400]


def test_a_case_that_ends_is_named_with_its_reason(tmp_path):
    with pytest.raises(Failed, match=r"^broken: ValueError: no such thing$"):
        failing = [sys.executable, "-c", "raise ValueError('no such thing')"]
        Resident("broken", failing, tmp_path, process.environment(1)).__enter__()


def test_an_interrupt_ends_the_cases_that_stay_started(fakes, tmp_path, monkeypatch):
    """`fakes` sees to it that nothing is left."""
    (tmp_path / "ladder" / cases.PROBE).write_text(STAYS)
    plan = timing.Plan
    monkeypatch.setattr(timing, "Plan", lambda *values: plan(*values, precise=True))
    monkeypatch.setattr(schedule, "free_mib", lambda host: 1e6)

    def interrupt():
        wait_until(lambda: len(process.marked(process.OWNER)) >= 3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fakes("good", blocks=1000)
    thread.join()


@pytest.mark.parametrize(
    ("launcher", "world", "foreign"),
    [("torchrun", 1, True), ("torchrun", 2, False), ("srun", 1, False)],
)
def test_what_runs_elsewhere_is_not_taken_for_foreign_work(
    launcher, world, foreign, tmp_path, monkeypatch
):
    """Ranks that sshd or Slurm started are no children, even those on this machine."""
    cores = os.cpu_count()
    host = Host("C", cores, nodes=("a", "b"), remote="on {host}")
    case = cases.Case("a case", "mnmc_ddp_launch.py", launcher, cores * world)
    monkeypatch.setattr(process, "launch", lambda *_: [{"event": "start"}, {"event": "end"}])
    plan = timing.Plan("fashion-mnist", "data", 256, 0, "resnet18", 0, True, 600.0, 2)
    runner = schedule.Runner(plan, [case], tmp_path, host, lambda *_: None)
    runner.data_flag = []
    runner.known = [{"kind": "gate", "case": cases.PLAIN, "step_seconds": 0.5}]
    runner.known += [{"kind": "gate", "case": case.name}]
    seen = runner.launch(case)["conditions"]
    assert ("foreign" in seen) == (seen["cpu_seconds"] is not None) == foreign
