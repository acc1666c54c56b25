"""python -m bench.measure.starts: whether starts of one case differ, and what makes them differ.

Several starts of a case, each in several environments, are all started, and compute in turn. What
their speeds differ by beyond what turns differ by was decided when they were started. Nothing else
of the project asks for this: the harness has both spreads in its intervals (results/stats.py).
"""

import argparse
import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import f

from bench import UserError
from bench.__main__ import parse
from bench.cases import Case, chosen
from bench.host import Host, look
from bench.measure import budget, process
from bench.measure.command import planned
from bench.measure.resident import Resident
from bench.measure.schedule import FOREVER

# By name: words before the command, variables that are set, and such that are taken away.
ENVIRONMENTS = {
    "the harness's": ([], {}, []),
    "glibc's thresholds": ([], {}, ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"]),
    "fixed addresses": (["setarch", "-R"], {}, []),
    "huge pages": ([], {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, []),
    "bound threads": ([], {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}, []),
}


def begun(case: Case, number: int, kind: str, plan, host: Host, size: int, logs: Path) -> Resident:
    """One start of a case in one of ENVIRONMENTS; size: steps between two records."""
    before, more, without = ENVIRONMENTS[kind]
    env = process.of_case(case, host) | more
    env = {name: value for name, value in env.items() if name not in without}
    flags = [*plan.flags(), *FOREVER, "--log-every", size]
    command = [*before, *case.command(*flags, host=host)]
    return Resident(f"{case.name} {kind} {number}".replace("'", ""), command, logs, env)


def measure(rows: list[Case], kinds: list[str], plan, host: Host, args) -> list[dict]:
    """A record of every turn of every start: images a second, by case, environment and start."""
    found = []
    with process.log_folder(False) as logs, ExitStack() as stack:
        ready = []
        for number in range(1, args.starts + 1):
            for case in rows:
                for kind in kinds:
                    made = begun(case, number, kind, plan, host, args.window, Path(logs))
                    about = {"case": case.name, "environment": kind, "start": number}
                    ready.append((about, stack.enter_context(made)))
                    print(f"started: {made.name}", file=sys.stderr)
        for turn in range(1, args.turns + 1):
            for about, resident in random.sample(ready, len(ready)):
                done = resident.slice(budget.TURN_WINDOWS * args.window, args.window)
                speed = done["images"] / done["seconds"]
                found.append({**about, "turn": turn, "images_per_second": speed})
        for _, resident in ready:
            resident.kill()
    return found


def analysed(found: list[dict]) -> list[dict]:
    """For each case and environment: the spread of the starts' speeds, what turns alone explain of
    it, and the probability of so much or more if starts did not differ (F test).

    Logarithms, each less the mean of its case's turn: what the whole machine did is in all alike.
    """
    names = sorted({(r["case"], r["environment"]) for r in found})
    logs = {}
    for case, kind in names:
        mine = [r for r in found if (r["case"], r["environment"]) == (case, kind)]
        starts, turns = (max(r[key] for r in mine) for key in ("start", "turn"))
        logs[case, kind] = np.zeros((starts, turns))
        for r in mine:
            speed = np.log(r["images_per_second"])
            logs[case, kind][r["start"] - 1, r["turn"] - 1] = speed
    rows = []
    for case, kind in names:
        others = [x for (name, _), x in logs.items() if name == case]
        drift = np.mean(np.concatenate(others), axis=0)
        left = logs[case, kind] - drift
        starts, turns = left.shape
        free = 1 - 1 / sum(map(len, others))  # the drift was taken from the same numbers
        turn = left.var(axis=1, ddof=1).mean() / free / turns
        start = left.mean(axis=1).var(ddof=1)
        row = {"case": case, "environment": kind, "starts": starts, "turns": turns}
        row |= {"speed": float(np.exp(logs[case, kind].mean()))}
        row |= {"between": float(start**0.5), "of_turns": float(turn**0.5)}
        rows.append(row | {"p": float(f.sf(start / turn, starts - 1, free * starts * (turns - 1)))})
    return rows


def show(rows: list[dict]) -> None:
    """A table for people."""
    table = Table(title="how much starts differ")
    for name in ("case", "environment", "starts x turns", "images/s", "spread of starts"):
        table.add_column(name)
    table.add_column("of turns alone")
    table.add_column("p")
    for row in rows:
        cells = [row["case"], row["environment"], f"{row['starts']} x {row['turns']}"]
        cells += [f"{row['speed']:.0f}", f"{row['between']:.1%}", f"{row['of_turns']:.1%}"]
        table.add_row(*cells, f"{row['p']:.2g}")
    Console().print(table)


def main(argv: list[str]) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--only", default="snsc.py", help="cases by a part of their names, with commas")
    add("--environments", default=",".join(ENVIRONMENTS), help="some of the default, with commas")
    add("--starts", type=int, default=3, help="of each case in each environment")
    add("--turns", type=int, default=12, help="of each start")
    add("--window", type=int, default=1, help="steps between two records; a turn has three")
    add("--techniques", action="store_true", help="cases are techniques")
    add("--out", type=Path, help="a file for the records, as JSON lines")
    args = parser.parse_args(argv)
    kinds = args.environments.split(",")
    if unknown := set(kinds) - set(ENVIRONMENTS):
        raise UserError(f"--environments {unknown.pop()}: give some of {','.join(ENVIRONMENTS)}")
    host = look()
    words = ["run", "--only", args.only, *["--techniques"] * args.techniques]
    asked = parse(words)
    rows = chosen(asked, host)
    plan, _ = planned(asked, host, rows)
    parts = args.only.split(",")
    rows = [case for case in rows if any(part in case.name for part in parts) and case.share == 1]
    rows = [case for case in rows if "again" not in case.name]
    process.heed_signals()
    try:
        found = measure(rows, kinds, plan, host, args)
    finally:
        process.end(process.OWNER)
    if args.out:
        args.out.write_text("".join(f"{json.dumps(record)}\n" for record in found))
    show(analysed(found))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
