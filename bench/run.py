"""Runs the cases: first the gate, then rounds in random order; all it learns is in records.jsonl.

The gate: a case's losses, step by step, against the exact oracle's (techniques/grad_accum.py). A
case that trains other numbers gets no speed. Gates are not timed, so on a CPU two run at once.

A round launches every case once, afresh: start-up and warm-up steps are dropped, the rest counts.
"""

import json
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import records
from bench.cases import AGAIN, PLAIN, Case
from bench.environment import gpus
from bench.launch import Finished, run
from bench.stats import ratio_interval, throughput

GATE_STEPS = 5
TOLERANCE = 1e-4  # relative, a step's loss on a CPU; measured: 0 at 2 processes, 1e-7 at 4
TOLERANCE_GPU = 2e-2  # TF32, and atomics in cuDNN: two runs of one script differ too
MEASURED, WINDOWS = 3.0, 4  # seconds a launch that count, in so many windows
ENOUGH = 0.03  # stop where every interval's half-width is below


@dataclass
class Plan:
    """What all cases of a run have in common."""

    dataset: str
    data: str
    batch_size: int
    workers: int
    arch: str
    seed: int
    quick: bool
    budget: float  # seconds
    rounds: int  # at most

    def flags(self) -> list[str]:
        """The scripts' flags that every launch gets."""
        flags = ["--dataset", self.dataset, "--data", self.data, "--arch", self.arch]
        return [*flags, "--batch-size", str(self.batch_size), "--workers", str(self.workers)]


class Failed(Exception):
    """A launch that did not end well; the text is the row's reason."""


def launch(command: list[str], env: dict, limit: float) -> tuple[list[dict], Finished]:
    """Runs a script's command with --log-json, and returns its records.

    Raises Failed with the exit code and the last error line, or the time limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        done = run([*command, "--log-json", str(log)], limit, env)
        if done.timed_out:
            raise Failed(f"killed after {limit:.0f} s, its time limit")
        if done.code:
            raise Failed(f"exit code {done.code}: {done.last_line}")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    if [line["event"] for line in lines][-1:] != ["end"]:
        raise Failed("ended without a record of its end")
    return lines, done


def losses(lines: list[dict]) -> list[float]:
    """The loss of each train record."""
    return [line["loss"] for line in lines if line["event"] == "train"]


def distance(mine: list[float], exact: list[float]) -> float:
    """The largest relative difference of two runs' losses; infinite where steps are missing."""
    if len(mine) != len(exact) or not mine:
        return float("inf")
    worst = max(abs(a - b) / abs(b) for a, b in zip(mine, exact, strict=True))
    return worst if worst == worst else float("inf")  # a NaN is no match


class Runner:
    """One run into one folder; every method appends what it learned before it returns."""

    def __init__(self, plan: Plan, cases: list[Case], folder: Path, progress):
        self.plan, self.folder, self.progress = plan, folder, progress
        self.cases = cases
        self.known = records.read(folder)[0] if (folder / records.NAME).exists() else []
        self.deadline = time.monotonic() + plan.budget

    def note(self, kind: str, **fields) -> None:
        records.append(self.folder, kind, **fields)
        self.known.append({"kind": kind, **fields})

    def done(self, kind: str, name: str) -> bool:
        return any(r["case"] == name for r in records.of(self.known, kind))

    def skips(self) -> None:
        """Takes the cases out that cannot run here, each with its reason."""
        for case in list(self.cases):
            if reason := case.missing():
                self.cases.remove(case)
                if not self.done("skip", case.name):
                    self.note("skip", case=case.name, reason=reason)

    def gates(self) -> float:
        """Checks each case's numbers; returns the reference's seconds a step."""
        flags = [*self.plan.flags(), "--max-steps", GATE_STEPS, "--log-every", 1]
        names = [case for case in self.cases if not self.done("gate", case.name)]
        wanted = {case.name: case for case in names if case.name != AGAIN}
        jobs = {name: (case.command(*flags), case.environment()) for name, case in wanted.items()}
        oracles = {name: tuple(case.oracle(*flags)) for name, case in wanted.items()}
        for name, command in oracles.items():
            if command != tuple(jobs[name][0]):  # the reference is its own oracle
                key = f"oracle {command[1:]} {wanted[name].threads}"
                env = dict(wanted[name].environment())
                env.pop("CUDA_VISIBLE_DEVICES", None)
                jobs.setdefault(key, (list(command), env))
                oracles[name] = key
            else:
                oracles[name] = name
        results: dict[str, list[dict] | Failed] = {}

        def job(name: str) -> None:
            self.progress(f"gate: {name.split(' (')[0]}")
            try:
                results[name] = launch(*jobs[name], limit=300)[0]
            except Failed as error:
                results[name] = error

        with ThreadPoolExecutor(1 if gpus() else 2) as pool:
            list(pool.map(job, jobs))
        for case in names:
            self.judge(case, results.get(case.name), results.get(oracles.get(case.name)))
        gate = next(r for r in records.of(self.known, "gate") if r["case"] == PLAIN)
        if not gate["passed"]:
            raise Failed(f"{PLAIN}, the reference, does not run: {gate['reason']}")
        passed = {r["case"] for r in records.of(self.known, "gate") if r["passed"]}
        self.cases = [case for case in self.cases if case.name in passed]
        return gate["step_seconds"]

    def judge(self, case: Case, mine, exact) -> None:
        """One gate's record."""
        if case.name == AGAIN:  # the reference's own
            first = next(r for r in records.of(self.known, "gate") if r["case"] == PLAIN)
            same = {key: value for key, value in first.items() if key not in ("kind", "case")}
            self.note("gate", case=AGAIN, **same)
            return
        fields = {"case": case.name, "passed": False, "distance": None}
        if isinstance(mine, Failed):
            self.note("gate", **fields, reason=str(mine))
        elif isinstance(exact, Failed):
            self.note("gate", **fields, reason=f"its oracle failed: {exact}")
        else:
            apart = distance(losses(mine), losses(exact))
            passed = apart <= (TOLERANCE_GPU if gpus() else TOLERANCE)
            fields |= {"passed": passed, "distance": apart}
            times = [r["seconds"] for r in mine if r["event"] == "train"]
            reason = "" if passed else f"wrong numbers: losses {apart:.1e} off the oracle's"
            self.note("gate", **fields, reason=reason, step_seconds=min(times), start=mine[0])

    def sample(self, case: Case, number: int, order: int, step_seconds: float) -> bool:
        """One launch of a case in a round; False where it failed."""
        measured = MEASURED / (2 if self.plan.quick else 1)
        window = max(1, round(measured / WINDOWS / step_seconds))
        warm_up = window * -(-5 // window)  # at least 5 steps, in whole windows
        steps = warm_up + WINDOWS * window
        flags = [*self.plan.flags(), "--max-steps", steps, "--log-every", window]
        flags += ["--epochs", 1_000_000, "--seed", self.plan.seed]
        begin = time.time()
        try:
            limit = 120 + 20 * steps * step_seconds
            lines, done = launch(case.command(*flags), case.environment(), limit)
        except Failed as error:
            self.note("failure", case=case.name, round=number, reason=str(error))
            return False
        trained = [line for line in lines if line["event"] == "train"]
        self.note(
            "sample",
            case=case.name,
            round=number,
            order=order,
            begin=begin,
            warm_up=warm_up,
            windows=trained,
            start=lines[0],
            end=lines[-1],
            evaluation=next(line for line in reversed(lines) if line["event"] == "eval"),
            wall_seconds=done.seconds,
        )
        return True

    def rounds(self, step_seconds: float) -> None:
        """Rounds until the intervals are narrow, the budget is spent, or there are enough."""
        dice = random.Random(self.plan.seed)
        first = 1 + max((r["round"] for r in records.of(self.known, "sample")), default=0)
        longest = 0.0
        for number in range(1, self.plan.rounds + 1):
            order = dice.sample(self.cases, len(self.cases))
            if number < first:
                continue  # done before --resume
            left = self.deadline - time.monotonic()
            if number > first and left < longest:
                self.note(
                    "stop",
                    reason=f"the next round would not fit into the budget ({left:.0f} s left)",
                )
                return
            begin = time.monotonic()
            for place, case in enumerate(order):
                left = self.deadline - time.monotonic()
                self.progress(f"round {number}: {case.name}", number, place / len(order), left)
                if not self.sample(case, number, place, step_seconds):
                    self.cases.remove(case)
            longest = max(longest, time.monotonic() - begin)
            if number >= 5 and self.narrow():
                self.note("stop", reason=f"every interval is within {ENOUGH:.0%}")
                return
        self.note("stop", reason="as many as --rounds asks for")

    def narrow(self) -> bool:
        """Whether every ratio's interval has a half-width below ENOUGH."""
        speeds = speeds_by_round(self.known)
        ratios = [ratio_interval(speeds[case.name], speeds[PLAIN]) for case in self.cases]
        return all((r[2] - r[1]) / 2 / r[0] < ENOUGH for r in ratios if r)


def counted(sample: dict) -> list[dict]:
    """A sample's windows after its warm-up."""
    return [w for w in sample["windows"] if w["step"] > sample["warm_up"]]


def speeds_by_round(known: list[dict]) -> dict[str, dict[int, float]]:
    """Images/s by case and round."""
    speeds: dict[str, dict[int, float]] = {}
    for sample in records.of(known, "sample"):
        speeds.setdefault(sample["case"], {})[sample["round"]] = throughput(counted(sample))
    return speeds


def settings(plan: Plan, cases: list[Case], title: str, environment: dict) -> dict:
    """The first record of a run."""
    rows = [asdict(case) | {"threads": case.threads} for case in cases]
    return {"title": title, "plan": asdict(plan), "cases": rows, "environment": environment}


def step_median(sample: dict) -> float:
    """The median over its counted windows of the seconds a step."""
    seconds, previous = [], sample["warm_up"]
    for w in counted(sample):
        seconds.append(w["seconds"] / (w["step"] - previous))
        previous = w["step"]
    return statistics.median(seconds)
