"""Makes a run: gates, then blocks, in each of which every case starts afresh, in random order.

A case that trains other numbers than the oracle gets no speed (gate.py). In a block the cases stay
started together and take short turns (resident.py), which on a machine with other users
tells much smaller differences apart. If they cannot, each is launched after the other
(--fresh, and on GPUs). All that is learned is in records.jsonl.
"""

import random
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np

from bench import ROOT, backends, data, process, records, stats
from bench.cases import AGAIN, PLAIN, Case
from bench.flops import peak
from bench.host import Host, free_mib
from bench.ladder import LOOPS
from bench.process import Failed
from bench.run import gate, timing
from bench.run.conditions import Watch, children_seconds
from bench.run.resident import Resident
from bench.run.timing import TURNS, Plan

CLOSING = 15.0  # seconds of the budget for the table, the plots and the page
FOREVER = ["--epochs", 10**6]
LONGEST = 900.0  # seconds of a launch's start, and of evaluations after short epochs


class Runner:
    """One run into one folder; every method appends what it learned before it returns."""

    def __init__(self, plan: Plan, cases: list[Case], folder: Path, host: Host, progress):
        self.plan, self.folder, self.host, self.progress = plan, folder, host, progress
        self.cases = cases
        self.known = records.read(folder)[0] if (folder / records.NAME).exists() else []
        self.deadline = time.monotonic() + plan.seconds() - CLOSING

    def note(self, kind: str, **fields) -> None:
        records.append(self.folder, kind, **fields)
        self.known.append({"kind": kind, **fields})

    def of(self, kind: str) -> dict[str, dict]:
        """The last record of a kind, by case."""
        return {record["case"]: record for record in records.of(self.known, kind)}

    def last(self, key: str) -> int:
        """The number of the last "block" or "round" that was measured; 0 before the first."""
        return max((r[key] for r in records.of(self.known, "sample")), default=0)

    def skips(self) -> None:
        """Takes the cases out that cannot run here, each with its reason."""
        for case in list(self.cases):
            if reason := backends.missing(case, self.host):
                self.drop(lambda other, gone=case: other is not gone)
                if case.name not in self.of("skip"):
                    self.note("skip", case=case.name, reason=reason)

    def drop(self, keep) -> None:
        """Keeps the cases that fit, and those alone whose world size is still among them."""
        self.cases = [case for case in self.cases if keep(case)]
        sizes = {1, *(case.world for case in self.cases)}
        known = self.of("skip").keys() | self.of("sample").keys()  # what was timed stays in a table
        for case in [case for case in self.cases if case.share not in sizes]:
            self.cases.remove(case)
            if case.name not in known:
                self.note("skip", case=case.name, reason=f"no case of {case.share} ranks runs")

    def gates(self) -> None:
        """Checks each case's numbers, and keeps the cases whose are right."""
        if not any(case.name == PLAIN for case in self.cases):
            raise Failed(self.of("skip")[PLAIN]["reason"])
        waiting = [case for case in self.cases if case.name not in self.of("gate")]
        own = [c for c in waiting if not self.same(c) and c.script != LOOPS.path]
        most = gate.images(max([case.batch or self.plan.batch_size for case in own], default=0))
        with self.log_folder() as made:
            flags = [*self.plan.flags(), *self.enlarged(Path(made), most)]
            found = gate.train_cases(own, flags, self.host, self.progress, self.judge)
        for case in waiting:
            if case.name not in self.of("gate"):
                self.judge(case, *found.get(case.name, ()))
        gates = self.of("gate")
        if not gates[PLAIN]["passed"]:
            raise Failed(f"{PLAIN} does not run: {gates[PLAIN]['reason']}")
        passed = {name for name, record in gates.items() if record["passed"]}
        passed -= self.of("failure").keys()  # of before --resume
        if PLAIN not in passed:
            raise Failed(f"{PLAIN} failed in this run: start a new one")
        self.drop(lambda case: case.name in passed)

    @staticmethod
    def same(case: Case) -> bool:
        """Whether the gate of snsc.py also counts for this case."""
        return case.name == AGAIN or case.share > 1

    def judge(self, case: Case, mine=None, exact=None) -> None:
        """One gate's record."""
        if case.script == LOOPS.path:
            found = {"passed": True, "distance": None, "reason": "no gate: trains other numbers"}
        elif self.same(case):
            first = self.of("gate")[PLAIN]
            found = {key: first[key] for key in ("passed", "distance", "reason")}
        else:
            found = gate.judge(case, mine, exact, self.host)
        self.note("gate", case=case.name, **found)

    def step_seconds(self, case: Case) -> float:
        """The median of what was timed of a case, else its gate's.

        On a CPU that of snsc.py's gate, since other gates run two at once.
        """
        timed = [r for r in records.of(self.known, "sample") if r["case"] == case.name]
        if timed:
            return float(np.median([x for r in timed for x in records.step_seconds(r)]))
        gates = self.of("gate")
        own = gates[case.name] if self.host.gpus else {}
        return own.get("step_seconds") or gates[PLAIN]["step_seconds"]

    def measure(self) -> None:
        """Blocks until the budget is spent, or there are as many as asked for."""
        self.together = self.plan.precise
        with self.log_folder() as made:
            self.data_flag = self.enlarged(Path(made), self.plan.images)
            if self.together and (reason := self.crowded()):
                self.together = False
                print(f"bench: each case is started by itself: {reason}", file=sys.stderr)
            begun, used = time.monotonic(), time.process_time()
            try:
                why = self.blocks()
            except Failed as error:
                self.note("stop", reason=str(error))
                raise
            share = (time.process_time() - used) / (time.monotonic() - begun)  # of a core
        self.note("stop", reason=why or "as many blocks as asked for", harness_cpu_share=share)

    def log_folder(self):
        """A temporary folder for logs and images, where every node of Slurm sees it."""
        return process.log_folder(any(self.shared(case) for case in self.cases))

    def shared(self, case: Case) -> bool:
        """Whether it may run elsewhere, and so needs its files where every machine sees them."""
        return case.launcher == "srun" or case.nodes(self.host) > 1

    def enlarged(self, folder: Path, images: int | None) -> list:
        """The flag --data for at least so many embedded training images; [] if there are enough."""
        source = ROOT / self.plan.data
        there = data.embedded(source) if self.plan.dataset == "fashion-mnist" else 0
        if not images or not 0 < there < images:
            return []
        return ["--data", data.write_images(folder, -(-images // there) * there, source=source)]

    def crowded(self) -> str | None:
        """Why the cases cannot all be started at once, in words; None where they can.

        Asleep, a case keeps all of its memory. Its gate has measured rank 0's.
        """
        gates, needed = self.of("gate"), 0.0
        for case in self.cases:
            end = gates[case.name].get("end") or gates[PLAIN]["end"]
            needed += case.processes * end["peak_memory_mib"]
        if needed <= (free := free_mib(self.host)):
            return None
        return (
            f"{len(self.cases)} cases at once need {needed / 1024:.1f} GiB of memory, "
            f"{free / 1024:.1f} GiB are free"
        )

    def blocks(self) -> str | None:
        """All blocks, the first in any case; returns why it stopped, None where all were made.

        Without --budget, cases that run one after the other get blocks enough for a claim, since
        how long they take to start differs from machine to machine: no time would fit them all.
        Cases that take turns give up turns instead, where that leaves blocks enough.
        """
        first, plan, self.turns = 1 + self.last("block"), self.plan, TURNS
        at_will = self.together or plan.budget or plan.quick
        least = 0 if at_will else min(stats.FEWEST, plan.blocks)
        cost = 0.0  # seconds of a block
        for block in range(first, plan.blocks + 1):
            left = self.deadline - time.monotonic()
            if block > max(first, least) and left < cost:
                return f"the next block would not fit into the budget ({max(0, left):.0f} s left)"
            begin, cases = time.monotonic(), len(self.cases)
            (self.block if self.together else self.launches)(block)
            if len(self.cases) < cases:  # one that failed may have taken long, and is gone now
                continue
            cost, left = time.monotonic() - begin, self.deadline - time.monotonic()
            if self.together:
                short = cost - (self.turns - 1) * self.round_cost
                if block + left // cost < stats.FEWEST <= block + left // short:
                    self.turns, cost = 1, short
            elif block < least and (more := (least - block) * cost) > left:
                self.deadline = time.monotonic() + more
                text = f"bench: the {least} blocks that a claim takes need {more / 60:.0f} minutes"
                print(f"{text} more; --budget ends a run earlier", file=sys.stderr)
        return None

    def at_once(self, block: int) -> int:
        """How many cases start at the same time: two, since most of a start keeps one core busy.

        In the first block each has the machine to itself: its start-up is what the table shows.
        """
        return 1 if block == 1 and not self.plan.quick else 2

    def order(self, *what) -> list[Case]:
        """The cases in random order, by the plan's seed and these words."""
        seed = " ".join(map(str, (self.plan.seed, *what)))
        return random.Random(seed).sample(self.cases, len(self.cases))

    def order_of_launches(self, round_: int) -> list[Case]:
        """In random order; but a quick run may be cut off before all cases have been timed. So it
        begins with those that have not, in the table's order: behind snsc.py, which all are
        compared with, and before its control.
        """
        timed = self.of("sample").keys()
        if not self.plan.quick or all(case.name in timed for case in self.cases):
            return self.order(round_)
        late = {PLAIN: -1, AGAIN: 2}
        return sorted(self.cases, key=lambda case: late.get(case.name, case.name in timed))

    def block(self, number: int) -> None:
        """Starts all cases, lets each take its turns, and ends them."""
        with self.log_folder() as logs, ExitStack() as stack:  # the cases end before it goes
            ready = self.start(number, Path(logs), stack)
            last, begin = self.last("round"), time.monotonic()
            for round_ in range(last + 1, last + 1 + self.turns):
                for place, case in enumerate(self.order(round_)):
                    self.say(f"block {number}, turn {round_ - last}: {case.name}", often=True)
                    turn = (self.turn, ready[case.name])
                    self.attempt(case, number, self.sample, number, round_, place, case, *turn)
            self.round_cost = (time.monotonic() - begin) / self.turns  # seconds
            for resident in ready.values():
                resident.kill()  # all at once, then one after the other is waited for

    def launches(self, number: int) -> None:
        """Launches each case, one after the other; a launch is a block's only turn."""
        round_ = self.last("round") + 1
        for place, case in enumerate(self.order_of_launches(round_)):
            self.say(f"block {number}: {case.name}")
            self.attempt(case, number, self.sample, number, round_, place, case, self.launch)

    def say(self, text: str, often: bool = False) -> None:
        """Shows what is running, and how much time is left."""
        self.progress(text, self.deadline - time.monotonic(), often)

    def attempt(self, case: Case, block: int, work, *arguments) -> None:
        """Runs work; a case that fails gets a row with its reason; the run ends if it is snsc."""
        try:
            work(*arguments)
        except Failed as error:
            self.note("failure", case=case.name, block=block, reason=str(error))
            self.cases.remove(case)
            if case.name == PLAIN:
                raise Failed(f"{PLAIN} failed in block {block}: {error}") from error

    def start(self, block: int, logs: Path, stack: ExitStack) -> dict[str, Resident]:
        """Starts every case and leaves it asleep."""
        ready, at_once, order = {}, self.at_once(block), self.order("block", block)
        waiting: deque[tuple[Case, Resident]] = deque()
        todo = deque(order)
        while todo or waiting:
            while todo and len(waiting) < at_once:
                case = todo.popleft()
                self.say(f"block {block}: starts {case.name}")
                waiting.append((case, stack.push(self.begin(case, logs))))
            case, resident = waiting.popleft()
            self.attempt(case, block, resident.ready, stock(case))
            if case in self.cases:
                ready[case.name] = resident
                facts = {"start": resident.start, "first": resident.first, "at_once": at_once}
                self.note("launch", case=case.name, block=block, **facts)
        return ready

    def started(self, case: Case, flags: list) -> tuple[list, dict]:
        """The command of a case with these flags beside the plan's, and its environment."""
        flags = [*self.plan.flags(), *self.data_flag, *flags, "--seed", self.plan.seed]
        env = process.environment(**case.own_variables(self.host))
        return case.command(*flags, host=self.host), env

    def begin(self, case: Case, logs: Path) -> Resident:
        """Starts a case, and does not wait for it."""
        step = self.step_seconds(case)
        size = timing.window(timing.TURN, timing.TURN_WINDOWS, step, case.period)
        command, env = self.started(case, [*FOREVER, "--log-every", size])
        resident = Resident(case.name, command, logs, env)
        resident.window = size
        return resident.begin()

    def sample(self, block: int, round_: int, place: int, case: Case, measure, *more) -> None:
        """One turn of a case, or a launch of its own. Raises Failed."""
        about = {"block": block, "round": round_, "order": place, "begin": time.time()}
        self.note("sample", case=case.name, **about, **measure(case, *more))

    def turn(self, case: Case, resident: Resident) -> dict:
        """What a turn of a case that stays started measured. Raises Failed."""
        steps, settle = timing.TURN_WINDOWS * resident.window, timing.SETTLE * resident.window
        with Watch(self.host) as watch:
            try:
                done = resident.slice(steps, settle)
            except Failed:
                resident.__exit__()  # else it stays awake beside all others
                raise
        found = {"warm_up": done["after"], "windows": done["windows"]}
        found |= {key: done[key] for key in ("memory_mib", "largest_mib")}
        return found | {"conditions": watch.seen(done["cpu_seconds"])}

    def launch(self, case: Case) -> dict:
        """What a launch of a case by itself measured. Raises Failed."""
        step = self.step_seconds(case)
        seconds = timing.MEASURED / (2 if self.plan.quick else 1)
        size = timing.window(seconds, timing.WINDOWS, step, case.period)
        warm_up = timing.warm_up(size, stock(case))
        steps = warm_up + timing.WINDOWS * size
        flags = [*FOREVER, "--max-steps", steps, "--log-every", size]
        command, env = self.started(case, flags)
        used, limit = children_seconds(), LONGEST + 20 * steps * step
        with Watch(self.host) as watch:
            lines = process.launch(command, env, limit)
        # What sshd or Slurm starts is no child of ours, so what it uses is not known.
        used = None if self.shared(case) else children_seconds() - used
        return {
            "warm_up": warm_up,
            "windows": [line for line in lines if line["event"] == "train"],
            "start": lines[0],
            "end": lines[-1],
            "wall_seconds": watch.wall,
            "conditions": watch.seen(used),
        }


def stock(case: Case) -> int:
    """Steps after which a case has used up what its loader had ready before the first."""
    return timing.STOCK if case.workers or case.script == LOOPS.path else 0


def make_setting(plan: Plan, cases: list[Case], title: str, host: Host, record: dict) -> dict:
    """The first record of a run; record: the host's."""
    rows = [
        asdict(case)
        | {"threads": case.threads(host), "precision": case.precision(host)}
        | {"backend": backends.carrier(case, host)}
        for case in cases
    ]
    found = {"title": title, "plan": asdict(plan), "cases": rows, "environment": record}
    if any(peak(record["gpus"], case.precision(host)) for case in cases):  # else there is no MFU
        size = plan.image_size or data.usual_size(plan.dataset)
        counted = process.run([sys.executable, "-m", "bench.flops", plan.arch, size], 120)
        flops = (None, None) if counted.code else map(int, counted.out.split())
        found |= dict(zip(("flops_per_image", "flops_of_products"), flops, strict=True))
    return found
