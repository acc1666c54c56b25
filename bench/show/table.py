"""table.md and table.csv of a run, from its records alone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import records
from bench.cases import AGAIN, DDP, PLAIN
from bench.show import words
from bench.show.summary import COLUMNS, by_case, title, usable


@dataclass(frozen=True)
class Column:
    """A column for people: its name, what it shows, and a row's text, "" where there is none."""

    name: str
    explained: str
    cell: Callable[[dict], str]


def number(key: str, text: str) -> Callable[[dict], str]:
    """The cell of one number."""
    return lambda row: "" if row.get(key) is None else text.format(row[key])


def interval(key: str, text: str) -> Callable[[dict], str]:
    """The cell of a number with its interval."""

    def cell(row: dict) -> str:
        if row.get(key) is None or row.get(f"{key}_low") is None:
            return number(key, text)(row)
        middle, low, high = (text.format(row[f"{key}{end}"]) for end in ("", "_low", "_high"))
        return f"{middle} [{low}, {high}]"

    return cell


def ratio(key: str) -> Callable[[dict], str]:
    """The cell of a ratio: its interval, and the claim in words."""

    def cell(row: dict) -> str:
        if row["case"] == PLAIN if key == "ratio" else row["case"] == f"{DDP} x{row['world']}":
            return "baseline"
        if row.get(key) is None:
            return ""
        claim = "the control" if row["case"] == AGAIN else row.get(key.replace("ratio", "claim"))
        return f"{words.ratio(row, key)} {claim or ''}".strip()

    return cell


def or_why(cell: Callable[[dict], str]) -> Callable[[dict], str]:
    """A cell that says why a case has no speed, where it has none."""
    return lambda row: cell(row) if row["status"] == "ok" else row["status"]


def steps(row: dict) -> str:
    """The median and the 95th percentile of a step's time."""
    ends = [number(f"step_{end}_ms", "{:,.0f}")(row) for end in ("p50", "p95")]
    return " / ".join(ends) if all(ends) else ""


def distance(row: dict) -> str:
    """How far the gate's numbers were from the oracle's."""
    return number("distance", "{:.0e}")(row).replace("0e+00", "0")


FEW = [
    Column("case", "xN: N processes", lambda row: row["case"]),
    Column("devices", "GPUs, or cores where there are none", number("devices", "{:.0f}")),
    Column("images/s", "mean of the blocks", or_why(number("images_per_second", "{:,.0f}"))),
    Column("speed-up", "over snsc.py: ratio [interval], and what it allows", ratio("ratio")),
    Column("efficiency", "speed-up per device", number("efficiency", "{:.0%}")),
    Column("against DDP xN", "mnmc_ddp_launch.py with as many processes", ratio("ddp_ratio")),
    Column("peak memory, MiB", "of all processes together", number("memory_mib", "{:,.0f}")),
]
MORE = [
    Column(
        "images/s [95%]", "the same with its interval", interval("images_per_second", "{:,.0f}")
    ),
    Column("blocks", "in which it was measured", number("blocks", "{:.0f}")),
    Column("between starts", "a ratio's spread", number("between_starts", "{:.1%}")),
    Column("between turns", "a ratio's spread", number("between_turns", "{:.1%}")),
    Column("waiting for data", "part of rank 0's time", number("data_share", "{:.1%}")),
    Column("local batch", "images a process", number("local_batch", "{:.0f}")),
    Column("step ms, p50 / p95", "median, 95th percentile", steps),
    Column("exposed communication", "part of a step", interval("exposed_share", "{:.0%}")),
    Column("start-up s", "up to the first step", number("startup_seconds", "{:.1f}")),
    Column("first step s", "of a fresh start", number("first_step_seconds", "{:.2f}")),
    Column("off the oracle", "largest relative distance", distance),
    Column("MFU", "of the peak FLOP/s", number("mfu", "{:.1%}")),
    Column("cost of a million", "images, by --price", number("cost_per_million", "{:.3g}")),
    Column("precision", "of convolutions", number("precision", "{}")),
    Column("backend", "that carries the numbers", number("backend", "{}")),
]


def tidy(known: list[dict]):
    """summary.by_case as a frame; what a case does not have is missing."""
    import pandas as pd  # here, since it takes a while and the page does without

    return pd.DataFrame(by_case(known), columns=COLUMNS)


def cells(rows: list[dict], columns: list[Column]) -> dict[str, list[str]]:
    """The texts of the rows, by column; without the columns that are empty."""
    found = {column.name: [column.cell(row) for row in rows] for column in columns}
    return {name: texts for name, texts in found.items() if name == "case" or any(texts)}


def notes(known: list[dict], part: list[dict], rows: list[dict], warning: str | None) -> list[str]:
    """What a reader must know beside the numbers: the cases without a speed, then the method.

    part: the records that the rows were made of, some or all of those known.
    """
    lines = [*words.without(rows), *words.method(part, rows)]
    samples = records.of(known, "sample")
    if bad := records.dropped(samples):
        worst = "; ".join(f"round {k}, {text}" for k, text in list(bad.items())[:3])
        lines.append(
            f"{len(bad)} of {len({s['round'] for s in samples})} rounds are left out for what else "
            f"the machine did ({worst}{'; ...' * (len(bad) > 3)}); table-all.md has them all."
        )
    lines += words.hints(known, rows)
    return lines + ([warning] if warning else [])


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

    Raises records.BadRecords.
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
        lines = [words.sentence(rows), *notes(known, part, rows, warning)]
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
