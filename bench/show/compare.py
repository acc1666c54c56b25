"""Two results by case, and what got slower; several machines' results side by side.

Two runs see different hours of a machine, so their images/s differ by its load. What a run measures
well is a case against snsc.py in the same block: that ratio is compared. On a machine without other
users, --absolute compares images/s themselves, those of snsc.py included.
"""

import math
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from bench import UserError, records, stats
from bench.cases import AGAIN, PLAIN
from bench.host import machine
from bench.show.summary import reasons, speeds, title, usable
from bench.show.table import markdown, replace, shown, tidy

FREE = dict.fromkeys(("budget", "blocks", "rounds", "launches", "price", "seed"))  # of a plan
SAME, LOST = "no change", "no speed in the new one"


@dataclass
class Result:
    """One folder: its records, and log images/s, or log-ratios to snsc.py, by case."""

    folder: Path
    known: list[dict]
    warning: str | None  # of lost records
    control: stats.Logs
    logs: dict[str, stats.Logs]

    @classmethod
    def of(cls, folder: Path, absolute: bool) -> "Result":
        """Reads a folder; raises records.BadRecords where it holds no block."""
        known, warning = records.measured(folder)
        known = usable(known)
        found = speeds(known)
        plain = found.get(PLAIN)
        if not plain:
            raise records.BadRecords(f"{folder}: no block of {PLAIN} yet, `run --resume` adds some")
        ratios = {name: stats.paired(mine, plain) for name, mine in found.items()}
        logs = {name: stats.logarithms(mine) for name, mine in found.items()}
        control = ratios.get(AGAIN, {})
        return cls(folder, known, warning, control, logs if absolute else ratios)

    def plan(self) -> dict:
        """What two runs must have in common to be compared."""
        return {**self.known[0]["plan"], **FREE, "data": self.known[0]["title"]}

    def planned(self) -> set[str]:
        """The cases that it was to measure, those apart that its machine cannot run."""
        skipped = {r["case"] for r in records.of(self.known, "skip")}
        return {case["name"] for case in self.known[0]["cases"]} - skipped


def change(old: stats.Logs, new: stats.Logs, claims: int) -> tuple:
    """new / old of two independent runs: the ratio, and the ends of its interval at the level of so
    many claims together, by Welch's t on the blocks; None where a run has too few.
    """
    sides = [stats.means(old), stats.means(new)]
    middle, counts = sides[1].mean() - sides[0].mean(), [len(side) for side in sides]
    if min(counts) < stats.FEWEST:
        return math.exp(middle), None, None
    squares = [stats.standard_error(side) ** 2 for side in sides]
    parts = sum(x**2 / (n - 1) for x, n in zip(squares, counts, strict=True))
    freedom = sum(squares) ** 2 / parts if parts else sum(counts) - 2  # Welch and Satterthwaite
    reach = stats.factor(freedom + 1, claims) * math.sqrt(sum(squares))
    return tuple(math.exp(x) for x in (middle, middle - reach, middle + reach))


def judge(old: Result, new: Result, tolerance: float, absolute: bool) -> pd.DataFrame:
    """A row a case of either result: ratio with interval, and its word.

    "slower" and "faster" by the rule of the table: where the interval, at the level that all rows
    share, excludes 1, and the change is beyond the tolerance; nothing where a run has fewer blocks
    than stats.FEWEST, or its control is too noisy.
    """
    both = [n for n in old.logs if n in new.logs and (absolute or n != PLAIN)]
    noisy = any(stats.too_noisy(stats.interval(side.control)) for side in (old, new))
    why = reasons(new.known)
    rows = []
    for name in dict.fromkeys([*old.logs, *new.logs]):
        row = {"case": name, "new / old": np.nan, "low": np.nan, "high": np.nan}
        if name in both:
            ratio = change(old.logs[name], new.logs[name], len(both))
            row |= dict(zip(("new / old", "low", "high"), ratio, strict=True))
            row["word"] = word(ratio, tolerance, noisy)
        elif name in old.logs and name in new.logs:
            row["word"] = "baseline"
        elif name in new.logs:
            row["word"] = "only in the new one"
        else:
            lost = name in new.planned() and name in why
            row["word"] = LOST if lost else "only in the old one"
        rows.append(row)
    return pd.DataFrame(rows)


def word(ratio: tuple, tolerance: float, noisy: bool) -> str:
    """The claim that a change allows."""
    if noisy or ratio[1] is None:
        return stats.NOTHING
    if ratio[1] <= 1 <= ratio[2] or abs(math.log(ratio[0])) <= math.log1p(tolerance):
        return SAME
    return "slower" if ratio[0] < 1 else "faster"


def compare(args: Namespace) -> int:
    """`compare OLD NEW`; 1 where a case got slower beyond --tolerance, or has no speed any more.

    Raises UserError where the two had other plans, without --anyway.
    """
    old, new = (Result.of(folder, args.absolute) for folder in (args.old, args.new))
    apart = records.differences(old.plan(), new.plan())
    if apart and not args.anyway:
        raise UserError(f"compare: the plans differ, --anyway compares them: {'; '.join(apart)}")
    apart += records.differences(*(r.known[0]["environment"] for r in (old, new)))
    frame = judge(old, new, args.tolerance, args.absolute)
    what = "images/s" if args.absolute else f"images/s against {PLAIN}"
    print(f"{what}, new / old; old: {args.old}, new: {args.new}\n")
    cells = frame[["case"]].copy()
    cells["new / old [95% together]"] = [span(row) for _, row in frame.iterrows()]
    cells[""] = frame["word"]
    print(markdown(cells))
    for line in apart or ["the environments and the settings are the same"]:
        print(f"- {line}")
    for side in (old, new):
        say_loss(side.warning)
    slower = [*frame[frame["word"].isin(["slower", LOST])]["case"]]
    if slower:
        print(f"bench: slower or lost: {', '.join(slower)}", file=sys.stderr)
    return int(bool(slower))


def span(row) -> str:
    """The cell of a change."""
    if pd.isna(row["low"]):
        return "" if pd.isna(row["new / old"]) else f"{row['new / old']:.3f}"
    return f"{row['new / old']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def say_loss(warning: str | None) -> None:
    """Says on stderr that records are lost."""
    if warning:
        print(f"bench: {warning}", file=sys.stderr)


def merge(args: Namespace) -> int:
    """`merge DIR...`: a row a case, and for each result its images/s and the ratio."""
    parts, heads = [], []
    for folder in args.folders:
        known, warning = records.measured(folder)
        say_loss(warning)
        known = usable(known)
        people = shown(tidy(known)).set_index("case")
        name = machine(known[0]["environment"])
        name = name if name not in heads else f"{name}, {folder.name}"
        heads.append(name)
        wanted = ["images/s [95%]", "speed-up"]
        people = people[[column for column in wanted if column in people]]
        parts.append(people.add_prefix(f"{name}: "))
    frame = pd.concat(parts, axis=1).fillna("").reset_index(names="case")
    lines = [f"- {title(records.read(folder)[0])}: {folder}" for folder in args.folders]
    text = markdown(frame) + "\n" + "\n".join(lines) + "\n"
    print(text)
    if args.out:
        replace(args.out, text)
    return 0
