"""Two results by case, and what got slower; several machines' results side by side.

Two runs see different hours of a machine, so images/s of one and the other differ by its load. What
a run measures well is a case against the reference of the same round; that ratio is compared. On a
machine of one's own, --absolute compares images/s themselves, the reference's included.
"""

import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from bench.cases import AGAIN, PLAIN
from bench.host import machine
from bench.results import records
from bench.results.records import speeds_by_round
from bench.results.stats import FEWEST, margin, ratio_interval, resampled_medians
from bench.results.summary import reasons, title, usable
from bench.results.table import markdown, replace, shown, tidy


@dataclass
class Result:
    """One folder: its records, and log images/s, or log-ratios to the reference, by case."""

    folder: Path
    known: list[dict]
    control: tuple | None
    logs: dict[str, list[float]]

    @classmethod
    def of(cls, folder: Path, absolute: bool) -> "Result":
        """Reads a folder; raises records.BadRecords where it holds no round."""
        known = usable(records.measured(folder)[0])
        bad = reasons(known)
        speeds = {n: values for n, values in speeds_by_round(known).items() if n not in bad}
        plain = speeds.get(PLAIN)
        if not plain:
            raise records.BadRecords(f"{folder}: no round of {PLAIN} yet, `run --resume` adds some")
        control = ratio_interval(speeds.get(AGAIN, {}), plain)
        logs = {}
        for name, rounds in speeds.items():
            shared = [k for k in rounds if absolute or k in plain]
            logs[name] = [np.log(rounds[k] / (1 if absolute else plain[k])) for k in shared]
        return cls(folder, known, control, logs)


def change(old: list[float], new: list[float]) -> tuple[float, float, float]:
    """new / old of two independent samples of logarithms: ratio of the medians, 95% interval.

    With fewer than 3 rounds on a side the widest ratio that they allow.
    """
    middle = np.median(new) - np.median(old)
    if min(len(old), len(new)) < 3:
        low, high = min(new) - max(old), max(new) - min(old)
    else:
        apart = resampled_medians(new, seed=1) - resampled_medians(old, seed=0)
        low, high = np.percentile(apart, [2.5, 97.5])
    return tuple(float(np.exp(x)) for x in (middle, low, high))


def judge(old: Result, new: Result, tolerance: float, absolute: bool) -> pd.DataFrame:
    """A row a case of either result: ratio with interval, and its word.

    "slower" and "faster" are claimed only where the interval excludes 1 and the change is beyond
    the tolerance and beyond what either run's control shows as noise.
    """
    least = margin(old.control, new.control, least=tolerance)
    rows = []
    for name in dict.fromkeys([*old.logs, *new.logs]):
        row = {"case": name, "new / old": np.nan, "low": np.nan, "high": np.nan}
        if name not in new.logs or name not in old.logs:
            row["word"] = "only in the old one" if name in old.logs else "only in the new one"
        elif not absolute and name == PLAIN:
            row["word"] = "the reference"
        else:
            row["new / old"], row["low"], row["high"] = change(old.logs[name], new.logs[name])
            beyond = abs(np.log(row["new / old"])) > least
            told_apart = not row["low"] <= 1 <= row["high"]
            word = "slower" if row["new / old"] < 1 else "faster"
            row["word"] = word if beyond and told_apart else "no change"
            if min(len(old.logs[name]), len(new.logs[name])) < FEWEST:
                row["word"] = "too few rounds"
        rows.append(row)
    return pd.DataFrame(rows)


def compare(args: Namespace) -> int:
    """`compare OLD NEW`; 1 where a case got slower beyond --tolerance, or has no speed any more."""
    old, new = (Result.of(folder, args.absolute) for folder in (args.old, args.new))
    plans = [{**r.known[0]["plan"], "title": r.known[0]["title"]} for r in (old, new)]
    apart = records.differences(*plans) + records.differences(
        *(r.known[0]["environment"] for r in (old, new))
    )
    frame = judge(old, new, args.tolerance, args.absolute)
    what = "images/s" if args.absolute else f"images/s against {PLAIN}"
    print(f"{what}, new / old; old: {args.old}, new: {args.new}\n")
    cells = frame[["case"]].copy()
    cells["new / old [95%]"] = [
        "" if pd.isna(r["low"]) else f"{r['new / old']:.3f} [{r['low']:.3f}, {r['high']:.3f}]"
        for _, r in frame.iterrows()
    ]
    cells[""] = frame["word"]
    print(markdown(cells))
    for line in apart or ["the environments and the settings are the same"]:
        print(f"- {line}")
    lost = frame[frame["word"] == "only in the old one"]["case"]
    slower = [*frame[frame["word"] == "slower"]["case"], *lost]
    if slower:
        print(f"bench: slower or lost: {', '.join(slower)}", file=sys.stderr)
    return int(bool(slower))


def merge(args: Namespace) -> int:
    """`merge DIR...`: a row a case, and for each result its images/s and the ratio."""
    parts, heads = [], []
    for folder in args.folders:
        known = usable(records.measured(folder)[0])
        people = shown(tidy(known)).set_index("case")
        name = machine(known[0]["environment"])
        name = name if name not in heads else f"{name}, {folder.name}"
        heads.append(name)
        wanted = ["images/s [95%]", "against snsc.py [95%]", "rank"]
        people = people[[column for column in wanted if column in people]]
        parts.append(people.add_prefix(f"{name}: "))
    frame = pd.concat(parts, axis=1).fillna("").reset_index(names="case")
    lines = [f"- {title(records.read(folder)[0])}: {folder}" for folder in args.folders]
    text = markdown(frame) + "\n" + "\n".join(lines) + "\n"
    print(text)
    if args.out:
        replace(args.out, text)
    return 0
