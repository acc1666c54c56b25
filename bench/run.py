"""Runs the cases: first the gates, then rounds in random order; all it learns is in records.jsonl.

A case that trains other numbers than the oracle gets no speed (bench/gate.py). Gates are not timed,
so on a CPU two run at once.

A round measures every case once. Either the cases stay started and take short turns (--precise,
bench/slices.py), which on a machine with other users tells much smaller differences apart; or it
launches each afresh and drops the warm-up steps (--fresh, and wherever there are several GPUs).
"""

import json
import random
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench import gate, records
from bench.cases import AGAIN, PLAIN, Case
from bench.conditions import Monitor, Watch, dropped
from bench.environment import gpus, peak
from bench.launch import Finished, environment, run
from bench.slices import CaseFailed, Resident
from bench.stats import FEWEST, ratio_interval, throughput

MEASURED, WINDOWS = 3.0, 8  # seconds a launch that count, in so many windows
# The same of a turn, for cases that stay started. Measured: what one turn differs from the next by
# is decided when it begins, so three windows tell as much as six, and more turns more.
TURN, TURN_WINDOWS = 0.75, 3
SETTLE = 2  # windows of a turn that do not count: the first holds the sleep, then caches are cold
LAUNCHES = 5  # starts of each of those: some of what a process costs is decided by its start
STARTING = 0.3  # the most of the time that the starts after the first may take
CLOSING = 10.0  # seconds of the budget for the table, the plots and the page
ENOUGH = 0.03  # stop where the half-width of every ratio's interval is below


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
    precise: bool = False
    launches: int = 1
    price: float | None = None  # of the machine, an hour

    def flags(self, share: int = 1) -> list[str]:
        """The scripts' flags that every launch gets; share: of the global batch, 2 for a half."""
        flags = ["--dataset", self.dataset, "--data", self.data, "--arch", self.arch]
        batch, workers = self.batch_size // share, self.workers // share
        return [*flags, "--batch-size", str(batch), "--workers", str(workers)]


class Failed(Exception):
    """A launch that did not end well; the text is the row's reason."""


def launch(command: list[str], env: dict, limit: float) -> tuple[list[dict], Finished]:
    """Runs a script's command with --log-json, and returns its records.

    Raises Failed with the exit code and the last error line, or the time limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, begun = Path(folder) / "log.jsonl", time.time()
        done = run([*command, "--log-json", str(log)], limit, env | {"TMPDIR": folder})
        if done.timed_out:
            raise Failed(f"killed after {limit:.0f} s, its time limit")
        if done.code:
            cure = "; lower --batch-size" if "out of memory" in done.last_line else ""
            raise Failed(f"exit code {done.code}: {done.last_line}{cure}")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    if [line["event"] for line in lines][-1:] != ["end"]:
        raise Failed("ended without a record of its end")
    if "time" in lines[0]:  # the oracle has none
        lines[0] = records.with_startup(lines[0], begun)
    return lines, done


class Runner:
    """One run into one folder; every method appends what it learned before it returns."""

    def __init__(self, plan: Plan, cases: list[Case], folder: Path, progress):
        self.plan, self.folder, self.progress = plan, folder, progress
        self.cases = cases
        self.known = records.read(folder)[0] if (folder / records.NAME).exists() else []
        self.deadline = time.monotonic() + plan.budget - CLOSING

    def note(self, kind: str, **fields) -> None:
        records.append(self.folder, kind, **fields)
        self.known.append({"kind": kind, **fields})

    def done(self, kind: str, name: str) -> bool:
        return any(r["case"] == name for r in records.of(self.known, kind))

    def skips(self) -> None:
        """Takes the cases out that cannot run here, each with its reason."""
        for case in list(self.cases):
            if reason := case.missing():
                self.drop(lambda other, gone=case: other is not gone)
                if not self.done("skip", case.name):
                    self.note("skip", case=case.name, reason=reason)

    def drop(self, keep) -> None:
        """Keeps the cases that fit, and those alone whose world size is still among them."""
        self.cases = [case for case in self.cases if keep(case)]
        sizes = {case.world for case in self.cases}
        self.cases = [case for case in self.cases if case.share == 1 or case.share in sizes]

    def gates(self) -> float:
        """Checks each case's numbers; returns the reference's seconds a step."""
        flags = [*self.plan.flags(), "--max-steps", gate.STEPS, "--log-every", 1]
        waiting = [case for case in self.cases if not self.done("gate", case.name)]
        # By command and threads, the environment: what several cases need runs once.
        jobs: dict[tuple, dict] = {}
        mine, exact = {}, {}
        for case in waiting:
            if not self.same(case):
                mine[case.name] = (tuple(case.command(*flags)), case.threads)
                exact[case.name] = (tuple(case.oracle(*flags)), case.threads)
                jobs.setdefault(mine[case.name], case.environment() | gate.EXACT)
                jobs.setdefault(exact[case.name], environment(case.threads) | gate.EXACT)
        results: dict[tuple, list[dict] | Failed] = {}

        def work(job: tuple) -> None:
            names = [name for name, key in mine.items() if key == job]
            self.progress(f"gate: {', '.join(names) or 'oracle'}")
            try:
                results[job] = launch([*job[0]], jobs[job], limit=300)[0]
            except Failed as error:
                results[job] = error

        first, *others = jobs or [None]
        if first:
            work(first)  # by itself, since its seconds a step set the length of the windows
        with ThreadPoolExecutor(1 if gpus() else 2) as pool:
            list(pool.map(work, others))
        for case in waiting:
            parts = (results.get(side.get(case.name)) for side in (mine, exact))
            self.judge(case, *parts)
        plain = next(r for r in records.of(self.known, "gate") if r["case"] == PLAIN)
        if not plain["passed"]:
            raise Failed(f"{PLAIN}, the reference, does not run: {plain['reason']}")
        passed = {r["case"] for r in records.of(self.known, "gate") if r["passed"]}
        passed -= {r["case"] for r in records.of(self.known, "failure")}  # of before --resume
        if PLAIN not in passed:
            raise Failed(f"{PLAIN}, the reference, failed in this run: start a new one")
        self.drop(lambda case: case.name in passed)
        return plain["step_seconds"]

    @staticmethod
    def same(case: Case) -> bool:
        """Whether the gate of the plain script is this case's, too."""
        return case.name == AGAIN or case.share > 1

    def judge(self, case: Case, mine, exact) -> None:
        """One gate's record."""
        if self.same(case):
            first = next(r for r in records.of(self.known, "gate") if r["case"] == PLAIN)
            found = {key: first[key] for key in ("passed", "distance", "reason")}
        else:
            found = gate.judged(case, mine, exact)
        self.note("gate", case=case.name, **found)

    def steps(self, seconds: float, windows: int, step_seconds: float) -> int:
        """Steps a window, so that so many windows take these seconds."""
        return max(1, round(seconds / windows / step_seconds))

    def sample(self, step_seconds: float, case: Case, number: int, place: int) -> None:
        """One launch of a case in a round.

        Raises Failed.
        """
        seconds = MEASURED / (2 if self.plan.quick else 1)
        window = self.steps(seconds, WINDOWS, step_seconds)
        warm_up = window * -(-5 // window)  # at least 5 steps, in whole windows
        steps = warm_up + WINDOWS * window
        flags = [*self.plan.flags(case.share), "--max-steps", steps, "--log-every", window]
        flags += ["--epochs", 1_000_000, "--seed", self.plan.seed]
        begin, limit = time.time(), 120 + 20 * steps * step_seconds
        used = children_seconds()
        with Watch(self.monitor) as watch:
            lines, done = launch(case.command(*flags), case.environment(), limit)
        used = children_seconds() - used if case.launcher != "srun" else None  # Slurm's, not ours
        self.note(
            "sample",
            case=case.name,
            round=number,
            order=place,
            begin=begin,
            warm_up=warm_up,
            windows=[line for line in lines if line["event"] == "train"],
            start=lines[0],
            end=lines[-1],
            wall_seconds=done.seconds,
            conditions=watch.seen(used),
        )

    def rounds(self, step_seconds: float) -> None:
        """Rounds until the intervals are narrow, the budget is spent, or there are enough."""
        number, self.wall, self.own = self.last_round(), 0.0, 0.0
        with Monitor() as self.monitor:
            if self.plan.precise:
                why = self.turns(step_seconds, number)
            else:
                measure = partial(self.sample, step_seconds)
                with self.accounted():
                    why = self.until_enough(number, self.deadline, measure)
        share = self.own / self.wall if self.wall else 0.0  # of a core, the starts of cases apart
        self.note("stop", reason=why or "as many rounds as asked for", harness_cpu_share=share)

    @contextmanager
    def accounted(self):
        """Adds up this process's CPU seconds, and the wall time, of the rounds."""
        begun, used = time.monotonic(), time.process_time()
        try:
            yield
        finally:
            self.wall += time.monotonic() - begun
            self.own += time.process_time() - used

    def last_round(self) -> int:
        """The last round of a run that is gone on with; 0 for a new one."""
        return max((r["round"] for r in records.of(self.known, "sample")), default=0)

    def turns(self, step_seconds: float, number: int) -> str | None:
        """Rounds of cases that stay started; each is started up to `launches` times."""
        if number >= self.plan.rounds:  # of a run that is gone on with
            return None
        window, launches = self.steps(TURN, TURN_WINDOWS, step_seconds), self.plan.launches
        for launched in range(1, launches + 1):
            begin = time.monotonic()
            with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
                ready = self.start(launched, number, window, Path(logs), stack)
                now = time.monotonic()
                left, took = max(0.0, self.deadline - now), now - begin
                if launched == 1:  # by itself it takes longer than the others will
                    launches = min(launches, self.plan.rounds, 1 + int(STARTING * left / took))
                deadline = now + left / (launches - launched + 1)
                most = -(-self.plan.rounds * launched // launches)
                with self.accounted():
                    turn = partial(self.turn, ready, launched)
                    why = self.until_enough(number, deadline, turn, most)
            number = self.last_round()
            if launched == launches or (why and why.startswith("every")):
                break
        return why

    def start(self, launched: int, number: int, window: int, logs: Path, stack: ExitStack) -> dict:
        """Starts every case and leaves it asleep; {name: Resident}.

        The first launch of each has the machine to itself: its start-up is what the table shows.
        Later ones start two at once, since most of a start keeps one core busy.
        """
        ready, at_once = {}, 1 if launched == 1 else 2
        flags = ["--log-every", window, "--epochs", 10**6, "--max-steps", 10**9]
        flags += ["--seed", self.plan.seed]
        order = random.Random(f"{self.plan.seed} {number}").sample(self.cases, len(self.cases))
        for k in range(0, len(order), at_once):
            group = order[k : k + at_once]
            left, names = self.deadline - time.monotonic(), ", ".join(case.name for case in group)
            self.progress(f"launch {launched}: {names}", number + 1, 0.0, left)
            started = []
            for case in group:
                command = case.command(*self.plan.flags(case.share), *flags)
                resident = Resident(case.name, command, logs, case.environment())
                started.append(stack.push(resident.begin()))
            for case, resident in zip(group, started, strict=True):
                try:
                    resident.ready()
                except CaseFailed as error:
                    self.fail(case, number + 1, error)
                    continue
                ready[case.name] = resident
                facts = {"start": resident.start, "first": resident.first, "at_once": at_once}
                self.note("launch", case=case.name, launch=launched, **facts)
        return ready

    def turn(self, ready: dict, launched: int, case: Case, number: int, place: int) -> None:
        """One turn of a case in a round.

        Raises CaseFailed.
        """
        begin = time.time()
        with Watch(self.monitor) as watch:
            try:
                done = ready[case.name].slice(TURN_WINDOWS, SETTLE)
            except CaseFailed:
                ready[case.name].__exit__()  # else it stays awake beside all others
                raise
        self.note(
            "sample",
            case=case.name,
            round=number,
            order=place,
            launch=launched,
            begin=begin,
            warm_up=done["after"],
            windows=done["windows"],
            conditions=watch.seen(done["awake_cpu_seconds"]),
        )

    def until_enough(self, number: int, deadline: float, measure, most=None) -> str | None:
        """Rounds after number, measure(case, round, place) for each case; why it stopped.

        None: there were as many as asked for. The first round is measured in any case.
        """
        longest, first = 0.0, number + 1
        for number in range(first, (most or self.plan.rounds) + 1):
            left = deadline - time.monotonic()
            if number > first and left < longest:
                return f"the next round would not fit into the budget ({left:.0f} s left)"
            begin = time.monotonic()
            order = random.Random(f"{self.plan.seed} {number}").sample(self.cases, len(self.cases))
            for place, case in enumerate(order):
                left = self.deadline - time.monotonic()
                self.progress(f"round {number}: {case.name}", number, place / len(order), left)
                try:
                    measure(case, number, place)
                except (Failed, CaseFailed) as error:
                    self.fail(case, number, error)
            longest = max(longest, time.monotonic() - begin)
            if number % 5 == 0 and self.narrow():
                return f"every ratio's interval has a half-width below {ENOUGH:.0%}"
        return None

    def fail(self, case: Case, number: int, error: Exception) -> None:
        """A case that failed: a row with its reason, and no speed; the reference's ends the run."""
        self.note("failure", case=case.name, round=number, reason=str(error))
        self.cases.remove(case)
        if case.name == PLAIN:
            raise Failed(f"{PLAIN}, the reference, does not run: {error}")

    def narrow(self) -> bool:
        """Whether the rounds that are kept suffice for a claim, and every ratio's half-width is
        below ENOUGH.
        """
        bad = dropped(records.of(self.known, "sample"))
        speeds = speeds_by_round([r for r in self.known if r.get("round") not in bad])
        if len(speeds.get(PLAIN, {})) < FEWEST:
            return False
        cases = [case.name for case in self.cases if case.name != PLAIN]
        ratios = [ratio_interval(speeds[name], speeds[PLAIN]) for name in cases if name in speeds]
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
    rows = [
        asdict(c) | {"threads": c.threads, "precision": c.precision, "backend": c.backend()}
        for c in cases
    ]
    found = {"title": title, "plan": asdict(plan), "cases": rows, "environment": environment}
    if any(peak(environment, case.precision) for case in cases):  # else there is no MFU to show
        size = 224 if plan.dataset == "imagenet" else 32
        counted = run([sys.executable, "-m", "bench.flops", plan.arch, size], 120)
        found["flops_per_image"] = None if counted.code else int(counted.out)
    return found


def children_seconds() -> float:
    """CPU seconds of all children so far that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def step_seconds(sample: dict) -> list[float]:
    """The seconds a step of each of a sample's counted windows."""
    found, previous = [], sample["warm_up"]
    for w in counted(sample):
        found.append(w["seconds"] / (w["step"] - previous))
        previous = w["step"]
    return found
