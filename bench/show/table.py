"""Writes table.md and table.csv of a run, from its records alone."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench import records
from bench.cases import AGAIN, DDP, PLAIN
from bench.show import words
from bench.show.summary import COLUMNS, by_case, title, usable


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
        if callable(self.cell):
            return self.cell(row)
        try:
            return self.cell.format(**row)
        except TypeError:  # None has no such format
            return ""


def interval(key: str, form: str) -> Callable[[dict], str]:
    """The cell of a number with its interval."""
    whole = Column("", "", f"{{{key}:{form}}} [{{{key}_low:{form}}}, {{{key}_high:{form}}}]")
    alone = Column("", "", f"{{{key}:{form}}}")
    return lambda row: whole.text(row) or alone.text(row)


def ratio(key: str) -> Callable[[dict], str]:
    """The cell of a ratio: its interval, and the claim in words."""

    def cell(row: dict) -> str:
        if row["case"] == PLAIN if key == "ratio" else row["case"] == f"{DDP} x{row['world']}":
            return "baseline"
        if row[key] is None:
            return ""
        claim = "the control" if row["case"] == AGAIN else row[key.replace("ratio", "claim")]
        return f"{words.ratio(row, key)} {claim or ''}".strip()

    return cell


def distance(row: dict) -> str:
    """How far the gate's numbers were from the oracle's."""
    return "0" if row["distance"] == 0 else Column("", "", "{distance:.0e}").text(row)


FEW = [
    Column("case", "xN: N processes", "{case}"),
    Column("devices", "GPUs, or cores where there are none", "{devices:.0f}"),
    Column("images/s", "mean of the blocks", "{images_per_second:,.0f}"),
    Column("speed-up", "over snsc.py: ratio [interval], and what it allows", ratio("ratio")),
    Column("efficiency", "speed-up per device", "{efficiency:.0%}"),
    Column("against DDP xN", "mnmc_ddp_launch.py with as many processes", ratio("ddp_ratio")),
    Column("peak memory, MiB", "of all processes together", "{memory_mib:,.0f}"),
]
MORE = [
    Column("images/s [95%]", "the same with its interval", interval("images_per_second", ",.0f")),
    Column("blocks", "in which it was measured", "{blocks:.0f}"),
    Column("between starts", "a ratio's spread", "{between_starts:.1%}"),
    Column("between turns", "a ratio's spread", "{between_turns:.1%}"),
    Column("waiting for data", "part of rank 0's time", "{data_share:.1%}"),
    Column("local batch", "images a process", "{local_batch:.0f}"),
    Column(
        "step ms, p50 / p95", "median, 95th percentile", "{step_p50_ms:,.0f} / {step_p95_ms:,.0f}"
    ),
    Column("exposed communication", "part of a step", interval("exposed_share", ".0%")),
    Column("start-up s", "up to the first step", "{startup_seconds:.1f}"),
    Column("first step s", "of a fresh start", "{first_step_seconds:.2f}"),
    Column("off the oracle", "largest relative distance", distance),
    Column("MFU", "of the peak FLOP/s", "{mfu:.1%}"),
    Column("cost of a million", "images, by --price", "{cost_per_million:.3g}"),
    Column("precision", "of convolutions", "{precision:s}"),
    Column("backend", "that carries the numbers", "{backend:s}"),
]


def tidy(known: list[dict]):
    """summary.by_case as a frame; what a case does not have is missing."""
    import pandas as pd  # here, since it takes a while and the page does without

    return pd.DataFrame(by_case(known), columns=COLUMNS)


def cells(rows: list[dict], columns: list[Column]) -> dict[str, list[str]]:
    """The texts of the rows, by column; without the columns that are empty."""
    found = {column.name: [column.text(row) for row in rows] for column in columns}
    return {name: texts for name, texts in found.items() if name == "case" or any(texts)}


def markdown(columns: dict[str, list[str]]) -> str:
    """A table in GitHub's Markdown; columns: the texts of each, by its name."""
    rows = zip(*columns.values(), strict=True)
    rows = ([text.replace("|", "\\|") for text in row] for row in rows)
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(folder: Path, read: tuple | None = None) -> tuple[str, dict, list[str]]:
    """Makes table.md and table.csv of a folder's records; returns the title, the columns that
    table.md has, and its lines: the first is the result in words, the others are the notes.

    table.csv has all columns. Where rounds are dropped, table-all.md and table-all.csv are made of
    all of them. read: what records.measured gives, where it is there already.

    Raises UserError.
    """
    known, warning = read or records.measured(folder)
    kept, heading = usable(known), title(known)
    for name, part in (("table-all", known), ("table", kept)):
        if name == "table-all" and len(known) == len(kept):
            for suffix in (".md", ".csv"):  # of an earlier call
                (folder / f"{name}{suffix}").unlink(missing_ok=True)
            continue
        rows = by_case(part)
        people = cells(words.timed(rows), FEW)
        lines = [words.sentence(rows), *words.notes(known, part, rows, warning)]
        text = f"**{heading}**\n\n{lines[0]}\n\n{markdown(people)}\n"
        replace(folder / f"{name}.md", text + "".join(f"- {line}\n" for line in lines[1:]))
        replace(folder / f"{name}.csv", tidy(part).to_csv(index=False))
    return heading, people, lines


def replace(path: Path, text: str) -> None:
    """Writes a file whole, or leaves it as it was."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
