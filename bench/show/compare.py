"""Compares two results by case.

Two runs see different hours of a machine, so their images/s differ by its load. What a run measures
well is a case against snsc.py in the same block: that ratio is compared. On a machine without other
users, --absolute compares images/s themselves, those of snsc.py included.
"""

import math
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from scipy.stats import ttest_ind

from bench import UserError, records, stats
from bench.cases import AGAIN, PLAIN
from bench.show.claims import span
from bench.show.summary import Run, log_speeds, reasons
from bench.show.table import markdown

FREE = dict.fromkeys(("budget", "blocks", "seed"))  # of a plan
LOST = "no speed in the new one"


@dataclass
class Result:
    """A run: its control's log-ratios by block, and of each case those, or log images/s."""

    run: Run
    control: pd.Series | None
    logs: dict[str, pd.Series]

    @classmethod
    def of(cls, folder: Path, absolute: bool) -> "Result":
        """Reads a folder; raises UserError where it holds no block."""
        run = Run.of(folder)
        speeds = log_speeds(run.known)
        if PLAIN not in speeds:
            raise UserError(f"{folder}: no block of {PLAIN} yet, `run --resume` adds some")
        ratios = speeds.sub(speeds[PLAIN], axis=0)
        logs = {name: stats.block_means(each) for name, each in ratios.items()}
        control = logs.get(AGAIN)
        if absolute:
            logs = {name: stats.block_means(each) for name, each in speeds.items()}
        return cls(run, control, logs)

    def plan(self) -> dict:
        """What two runs must have in common to be compared."""
        setting = self.run.known[0]
        return {**setting["plan"], **FREE, "data": setting["title"]}

    def planned(self) -> set[str]:
        """The cases that it was to measure, those apart that its machine cannot run."""
        skipped = {r["case"] for r in records.of(self.run.known, "skip")}
        return {case["name"] for case in self.run.known[0]["cases"]} - skipped

    def noisy(self) -> bool:
        """Whether its control forbids claims."""
        return self.control is not None and stats.too_noisy(stats.interval(self.control))


def change(old, new, claims: int) -> tuple:
    """new / old of two independent runs, whose numbers by block these are: the ratio, and the ends
    of its interval at the level of so many claims together, by Welch's t; None where a run has too
    few blocks.
    """
    middle = float(new.mean() - old.mean())
    if min(len(old), len(new)) < stats.FEWEST:
        return math.exp(middle), None, None
    level = 1 - (1 - stats.LEVEL) / max(1, claims)
    ends = ttest_ind(new, old, equal_var=False).confidence_interval(level)
    return tuple(math.exp(x) for x in (middle, *ends))


def judge(old: Result, new: Result, tolerance: float, absolute: bool) -> dict[str, tuple]:
    """The change of each case of either result, None where it is not known, and what it allows.

    "slower" and "faster" by the rule of the table: where the interval, at the level that all rows
    share, excludes 1, and the change is beyond the tolerance; nothing where a run has fewer blocks
    than stats.FEWEST, or its control is too noisy.
    """
    both = [n for n in old.logs if n in new.logs and (absolute or n != PLAIN)]
    noisy = old.noisy() or new.noisy()
    lost = new.planned() & reasons(new.run.known).keys()
    found = {}
    for name in dict.fromkeys([*old.logs, *new.logs]):
        if name in both:
            ratio = change(old.logs[name], new.logs[name], len(both))
            said = stats.NOTHING if noisy else stats.difference(ratio, tolerance)
            found[name] = ratio, said
        elif name == PLAIN:
            found[name] = None, "baseline"
        elif name in new.logs:
            found[name] = None, "only in the new one"
        else:
            found[name] = None, LOST if name in lost else "only in the old one"
    return found


def compare(args: Namespace) -> int:
    """`compare OLD NEW`; 1 where a case got slower beyond --tolerance, or has no speed any more.

    Raises UserError where the two had other plans, without --anyway.
    """
    old, new = (Result.of(folder, args.absolute) for folder in (args.old, args.new))
    apart = records.differences(old.plan(), new.plan())
    if apart and not args.anyway:
        raise UserError(f"compare: the plans differ, --anyway compares them: {'; '.join(apart)}")
    apart += records.differences(*(r.run.known[0]["environment"] for r in (old, new)))
    found = judge(old, new, args.tolerance, args.absolute)
    what = "images/s" if args.absolute else f"images/s against {PLAIN}"
    print(f"{what}, new / old; old: {args.old}, new: {args.new}\n")
    rows = [[name, span(*ratio) if ratio else "", said] for name, (ratio, said) in found.items()]
    print(markdown([["case", "new / old [95% together]", ""], *rows]) + "\n")
    for line in apart or ["the environments and the settings are the same"]:
        print(f"- {line}")
    for side in (old, new):
        if side.run.warning:
            print(f"bench: {side.run.warning}", file=sys.stderr)
    slower = [name for name, (_, said) in found.items() if said in ("slower", LOST)]
    if slower:
        print(f"bench: slower or lost: {', '.join(slower)}", file=sys.stderr)
    return int(bool(slower))
