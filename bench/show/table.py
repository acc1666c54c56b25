"""Writes table.md and table.csv of a run, from its records alone."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from bench import records
from bench.cases import AGAIN, DDP, PLAIN
from bench.show.claims import legend, span, verdict
from bench.show.summary import COLUMNS, Run, by_case, timed, title


class Column(NamedTuple):
    """A column for people: its name, what it shows, and how a row's text is made.

    cell: a format of the fields of a row, which have no text where one of them is None; or a
    function of the row.
    """

    name: str
    explained: str
    cell: str | Callable[[dict], str]

    def text(self, row: dict) -> str:
        """A row's text, "" where there is none."""
        return self.cell(row) if callable(self.cell) else filled(self.cell, row)


def filled(form: str, row: dict) -> str:
    """A format of a row's fields, "" where one of them is None."""
    try:
        return form.format(**row)
    except TypeError:  # None has no such format
        return ""


def interval_cell(key: str, form: str) -> Callable[[dict], str]:
    """The cell of a number with its interval."""
    alone = f"{{{key}:{form}}}"
    whole = f"{alone} [{{{key}_low:{form}}}, {{{key}_high:{form}}}]"
    return lambda row: filled(whole, row) or filled(alone, row)


def ratio_cell(key: str) -> Callable[[dict], str]:
    """The cell of a ratio: its interval, and the claim in words."""

    def cell(row: dict) -> str:
        if row["case"] == PLAIN if key == "ratio" else row["case"] == f"{DDP} x{row['world']}":
            return "baseline"
        if row[key] is None:
            return ""
        claim = "the control" if row["case"] == AGAIN else row[key.replace("ratio", "claim")]
        found = span(row[key], row[f"{key}_low"], row[f"{key}_high"])
        return f"{found} {claim or ''}".strip()

    return cell


def distance(row: dict) -> str:
    """How far the gate's numbers were from the oracle's."""
    return "0" if row["distance"] == 0 else filled("{distance:.0e}", row)


FEW = [
    Column("case", "xN: N processes", "{case}"),
    Column("devices", "GPUs, or cores where there are none", "{devices:.0f}"),
    Column("images/s", "mean of the blocks", "{images_per_second:,.0f}"),
    Column("speed-up", "over snsc.py: ratio [interval], and what it allows", ratio_cell("ratio")),
    Column("efficiency", "speed-up per device", "{efficiency:.0%}"),
    Column("against DDP xN", "mnmc_ddp_launch.py with as many processes", ratio_cell("ddp_ratio")),
    Column("peak memory, MiB", "of all processes together", "{memory_mib:,.0f}"),
    Column("MFU", "of the peak FLOP/s", "{mfu:.1%}"),
]
BETWEEN = [  # what ranks send, and how long they wait
    Column("largest process, MiB", "its peak memory", "{largest_mib:,.0f}"),
    Column("sent per step, MiB", "by all processes together, on a CPU", "{sent_mib:,.1f}"),
    Column("idle", "share of the cores' time without computing", "{idle:.0%}"),
]
MORE = [
    *BETWEEN,
    Column(
        "parallel overhead",
        "part of a step that is lost to communication, waiting and contention",
        interval_cell("overhead_share", ".0%"),
    ),
    Column(
        "images/s [95%]", "the same with its interval", interval_cell("images_per_second", ",.0f")
    ),
    Column("blocks", "in which it was measured", "{blocks:.0f}"),
    Column("between starts", "a ratio's spread", "{between_starts:.1%}"),
    Column("between turns", "a ratio's spread", "{between_turns:.1%}"),
    Column("waiting for data", "part of rank 0's time", "{data_share:.1%}"),
    Column("local batch", "images a process", "{local_batch:.0f}"),
    Column("steps per window", "a window's time is measured as a whole", "{window_steps:,.0f}"),
    Column(
        "ms per step, p50 / p95 of windows",
        "median, 95th percentile of the windows' means, so not of single steps",
        "{window_p50_ms:,.1f} / {window_p95_ms:,.1f}",
    ),
    Column("start-up s", "up to the first step", "{startup_seconds:.1f}"),
    Column("first step s", "of a fresh start", "{first_step_seconds:.2f}"),
    Column("off the oracle", "largest relative distance", distance),
    Column("precision", "of convolutions", "{precision:s}"),
    Column("backend", "that carries the numbers", "{backend:s}"),
]


def cells(rows: list[dict], columns: list[Column]) -> list[list[str]]:
    """The texts of the rows, below the names of the columns; without the columns that are empty."""
    kept = [c for c in columns if c.name == "case" or any(c.text(row) for row in rows)]
    return [[column.name for column in kept], *([c.text(row) for c in kept] for row in rows)]


def markdown(rows: list[list[str]]) -> str:
    """A table in GitHub's Markdown; the first row names the columns, numbers go to the right."""
    columns = ([text for text in column[1:] if text] for column in zip(*rows, strict=True))
    numbers = [texts and all(re.fullmatch(r"[\d.,]+%?", x) for x in texts) for texts in columns]
    head, *body = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    line = ["---:" if right else "---" for right in numbers]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, line, *body])


def write(run: Run) -> None:
    """Makes table.md, and table.csv, which has all columns; where rounds are dropped,
    table-all.md and table-all.csv are made of all of them.
    """
    made = {"table": run}
    if run.known != run.every:
        made["table-all"] = replace(run, known=run.every, rows=by_case(run.every))
    for name, part in made.items():
        rows = timed(part.rows)
        more = BETWEEN if any(row["technique"] for row in rows) else []
        people = markdown(cells(rows, [*FEW, *more]))
        text = f"**{title(run.known)}**\n\n{verdict(part.rows)}\n\n{people}\n\n"
        text += "".join(f"- {line}\n" for line in legend(part))
        records.write_whole(run.folder / f"{name}.md", text)
        frame = pd.DataFrame(part.rows, columns=COLUMNS)  # what a case does not have is missing
        records.write_whole(run.folder / f"{name}.csv", frame.to_csv(index=False))
    for old in run.folder.glob("table-all.*"):
        if len(made) == 1:  # of an earlier call
            old.unlink()
