"""The plan of a run and its rounds: gates first, then every case once a round, in random order.

A case that trains other numbers than the oracle gets no speed (gate.py). In a round either the
cases stay started and take short turns (--precise, resident.py), which on a machine with other
users tells much smaller differences apart; or each is launched afresh and its warm-up steps dropped
(--fresh, and wherever there are several GPUs). All that is learned is in records.jsonl.
"""

import random
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench import backends
from bench.cases import AGAIN, PLAIN, Case
from bench.flops import peak
from bench.host import Host
from bench.measure import gate, process
from bench.measure.conditions import Monitor, Watch, children_seconds
from bench.measure.process import Failed
from bench.measure.resident import CaseFailed, Resident
from bench.results import records
from bench.results.records import dropped, speeds_by_round
from bench.results.stats import FEWEST, ratio_interval

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


class Runner:
    """One run into one folder; every method appends what it learned before it returns."""

    def __init__(self, plan: Plan, cases: list[Case], folder: Path, host: Host, progress):
        self.plan, self.folder, self.host, self.progress = plan, folder, host, progress
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
            if reason := backends.missing(case, self.host):
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
        waiting = [case for case in self.cases if not self.done("gate", case.name)]
        own = [case for case in waiting if not self.same(case)]
        found = gate.outcomes(own, self.plan.flags(), self.host, self.progress)
        for case in waiting:
            self.judge(case, *found.get(case.name, (None, None)))
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
            found = gate.judged(case, mine, exact, self.host)
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
            command = case.command(*flags, host=self.host)
            lines, done = process.launch(command, process.of_case(case, self.host), limit)
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
        with Monitor(self.host) as self.monitor:
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
                own = [*self.plan.flags(case.share), *flags]
                command, env = case.command(*own, host=self.host), process.of_case(case, self.host)
                resident = Resident(case.name, command, logs, env)
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


def settings(plan: Plan, cases: list[Case], title: str, host: Host, record: dict) -> dict:
    """The first record of a run; record: the host's."""
    rows = [
        asdict(case)
        | {"threads": case.threads(host), "precision": case.precision(host)}
        | {"backend": backends.carrier(case, host)}
        for case in cases
    ]
    found = {"title": title, "plan": asdict(plan), "cases": rows, "environment": record}
    names = record["gpus"]
    if any(peak(names, case.precision(host)) for case in cases):  # else there is no MFU to show
        size = 224 if plan.dataset == "imagenet" else 32
        counted = process.run([sys.executable, "-m", "bench.flops", plan.arch, size], 120)
        found["flops_per_image"] = None if counted.code else int(counted.out)
    return found
