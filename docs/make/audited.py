"""The tables of docs/evidence/audit.md: what audit.py finds of the mistakes in docs/diffs/."""

from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pandas as pd

from docs.make.logs import Part, Piece, link, paragraph
from mistakes import found as judge
from mistakes.found import SERIOUS, latest
from mistakes.outcomes import FOLDER, KINDS, anchor, heading, read
from mistakes.page import parse

PAGE = "docs/evidence/audit.md"
COLUMNS = {
    judge.CAUSE: "cause named",
    judge.HINTED: "as a HINT",
    judge.CONSEQUENCE: "a consequence",
    judge.MISSED: "missed",
    judge.NOT_RUN: "not run",
}
NAMED = [judge.CAUSE, judge.HINTED]
# What most readers write: DDP by any launcher, and Horovod.
USUAL = ["mnmc_ddp_launch", "mnmc_ddp_mp", "mnmc_ddp_slurm", "mnmc_horovod"]
parsed = cache(parse)


def judgements(path: Path) -> pd.DataFrame:
    """A row for each mistake of outcomes.json with an effect: what became of it."""
    records, rows = latest(path), []
    for page, outcomes in read(FOLDER).items():
        for piece, outcome in outcomes.items():
            if outcome["kind"] == KINDS[-1]:
                continue
            row = {"page": page, "piece": piece, "outcome": outcome["kind"]}
            record = row | records.get((page, piece), {"reason": "not yet run"})
            named = judge.cause(record)
            steps = [finding["step"] for finding in judge.naming(record, named) if finding["step"]]
            row |= {"judged": judge.judged(record, named), "step": min(steps, default=None)}
            rows.append(row | {"reason": judge.reason(record), "record": record})
    return pd.DataFrame(rows)


def share(rows: pd.DataFrame) -> str:
    """How many of some mistakes are found with their cause, in words."""
    named = rows["judged"].isin(NAMED).sum()
    ran = (rows["judged"] != judge.NOT_RUN).sum()
    text = f"{named} of {len(rows)} ({named / len(rows):.0%})"
    return text if ran == len(rows) else f"{text}, or of the {ran} that ran here {named / ran:.0%}"


def summary(path: Path) -> Iterator[Piece]:
    """How many silent mistakes are found, and how many false alarms there are."""
    rows, records = judgements(path), latest(path)
    about = next(iter(records.values()))
    silent = rows[rows["outcome"] == "silent"]
    usual = silent[silent["page"].isin(USUAL)]
    yield paragraph(
        f"""With `audit.py` of hash {about["audit"]}, torch {about["torch"]}, on {about["cores"]}
        cores of {about["cpu"]} ({link(path)}). The cause is named of {share(silent)} of the silent
        mistakes; in DDP's three scripts and Horovod's of {share(usual)}."""
    )
    right = {name: record for (page, name), record in records.items() if not page}
    ran = {name: record for name, record in right.items() if "reason" not in record}
    alarms = {n: [f for f in r["findings"] if f["level"] in SERIOUS] for n, r in ran.items()}
    alarms = {name: found for name, found in alarms.items() if found}
    told = [f"{name}: {', '.join(f['kind'] for f in found)}" for name, found in alarms.items()]
    if ran:
        text = f"""False alarms, that is an ERROR or a WARN, in {len(alarms)} of {len(ran)} right
            programs{": " if told else ""}{"; ".join(told)}."""
        yield paragraph(text)


def counts(path: Path, by: str) -> Iterator[Piece]:
    """A row for each page of silent mistakes, or for each outcome."""
    rows = judgements(path)
    rows = rows[rows["outcome"] == "silent"] if by == "page" else rows
    table = []
    for name in dict.fromkeys(rows[by]) if by == "page" else KINDS[:-1]:
        mine = rows[rows[by] == name]
        found, steps = Counter(mine["judged"]), mine["step"].dropna()
        words = f"[{name}](../diffs/{name}.md)" if by == "page" else name
        ends = sorted({int(steps.min()), int(steps.max())}) if len(steps) else []
        numbers = [str(found[kind] or "") for kind in COLUMNS]
        table.append([words, str(len(mine)), *numbers, " to ".join(map(str, ends))])
    yield pd.DataFrame(table, columns=[by, "mistakes", *COLUMNS.values(), "first seen in step"])


def misses(path: Path) -> Iterator[Piece]:
    """Each silent mistake whose cause is not named, and why."""
    rows = judgements(path)
    rows = rows[(rows["outcome"] == "silent") & ~rows["judged"].isin(NAMED)]
    table = []
    for row in rows.to_dict("records"):
        page = parsed(FOLDER / f"{row['page']}.md")
        words = heading(page, row["piece"])
        place = f"[{words}](../diffs/{page.name}.md#{anchor(words)})"
        serious = [f["kind"] for f in row["record"].get("findings", []) if f["level"] in SERIOUS]
        table.append([page.name, place, ", ".join(dict.fromkeys(serious)), row["reason"]])
    yield pd.DataFrame(table, columns=["page", "mistake", "reported instead", "why"])


FILE = "audit.jsonl"
PARTS = [
    Part(PAGE, "summary", FILE, summary),
    Part(PAGE, "pages", FILE, partial(counts, by="page")),
    Part(PAGE, "outcomes", FILE, partial(counts, by="outcome")),
    Part(PAGE, "misses", FILE, misses),
]
