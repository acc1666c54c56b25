"""The tables of docs/evidence/audit.md: what audit.py finds of the mistakes in docs/diffs/."""

from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache, partial
from pathlib import Path

import pandas as pd

from bench.records import lines as read_lines
from docs.make.logs import Part, Piece, link, paragraph
from mistakes import found as judge
from mistakes.found import latest
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
# What most readers write: DDP by three launchers, and Horovod.
USUAL = ["mnmc_ddp_launch", "mnmc_ddp_mp", "mnmc_ddp_slurm", "mnmc_horovod"]
NEAR = 5  # lines
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
            findings = judge.naming(record, named)
            steps = [finding["step"] for finding in findings if finding["step"]]
            row |= {"judged": judge.judged(record, named), "step": min(steps, default=None)}
            row["near"] = near(page, piece, findings)
            rows.append(row | {"reason": judge.reason(record), "record": record})
    return pd.DataFrame(rows)


def near(page: str, piece: str, findings: list[dict]) -> bool:
    """Whether one of these findings names a line that is at most NEAR lines from a changed one."""
    right = parsed(FOLDER / f"{page}.md")
    texts = right.whole().splitlines(), right.mutated(piece).splitlines()
    changes = SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    changed = [(start, end) for kind, _, _, start, end in changes if kind != "equal"]
    lines = [int((finding["line"] or "").rpartition(":")[2] or -9) for finding in findings]
    return any(a + 1 - NEAR <= line <= max(b, a + 1) + NEAR for line in lines for a, b in changed)


def share(rows: pd.DataFrame, what: str = "") -> str:
    """Of how many of some mistakes the cause is named, in words; what: they are."""
    named = rows["judged"].isin(NAMED).sum()
    return f"{named} of {len(rows)}{what} ({named / len(rows):.0%})"


def named() -> str:
    """Of how many silent mistakes that ran, by all records, the cause is named: 76 of 94."""
    records = [record for record in judge.known().values() if record["outcome"] == "silent"]
    found = [judge.judged(record, judge.cause(record)) for record in records]
    ran = [verdict for verdict in found if verdict != judge.NOT_RUN]
    return f"{sum(verdict in NAMED for verdict in ran)} of {len(ran)}"


def summary(path: Path) -> Iterator[Piece]:
    """How many silent mistakes are found, and how many false alarms there are."""
    rows, records = judgements(path), latest(path)
    about = next(iter(records.values()))
    silent = rows[rows["outcome"] == "silent"]
    ran = silent[silent["judged"] != judge.NOT_RUN]
    usual = silent[silent["page"].isin(USUAL)]
    hints = (silent["judged"] == judge.HINTED).sum()
    yield paragraph(
        f"""On {about["cores"]} cores of {about["cpu"]} with torch {about["torch"]}
        ({link(path)}), `audit.py` (SHA-256 {about["audit"]}) names the cause of
        {share(silent, " silent mistakes")}; {hints} of these findings are HINTs.
        {len(silent) - len(ran)} mistakes could not run here. Of those that ran, it names
        {share(ran)}. Of those in the scripts that most readers write, DDP by three launchers and
        Horovod, it names {share(usual)}. Of the findings that name the cause,
        {silent["near"].sum()} name a line that is at most {NEAR} lines from the mistake."""
    )
    right = [r for r in records.values() if not r["page"] and "reason" not in r]
    if right:
        alarms = {r["piece"]: [f["kind"] for f in judge.serious(r)] for r in right}
        told = [f"{name} ({', '.join(kinds)})" for name, kinds in alarms.items() if kinds]
        text = f"""It gives a false alarm, an ERROR or a WARN, in {len(told)} of {len(right)} right
            programs{": " * bool(told)}{", ".join(told)}."""
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
    """The silent mistakes whose cause is not named, and why; those of one reason together."""
    rows = judgements(path)
    rows = rows[(rows["outcome"] == "silent") & ~rows["judged"].isin(NAMED)]
    table: dict[tuple, list[str]] = {}
    for row in rows.to_dict("records"):
        page = parsed(FOLDER / f"{row['page']}.md")
        words = heading(page, row["piece"])
        place = f"[{words}](../diffs/{page.name}.md#{anchor(words)})"
        kinds = dict.fromkeys(finding["kind"] for finding in judge.serious(row["record"]))
        table.setdefault((page.name, ", ".join(kinds), row["reason"]), []).append(place)
    body = [[page, " · ".join(places), *rest] for (page, *rest), places in table.items()]
    yield pd.DataFrame(body, columns=["page", "mistakes", "reported instead", "why"])


def others(path: Path) -> Iterator[Piece]:
    """What the audit reports of scripts of other projects: a row for each.

    `judged` of a record says of a finding's kind what we read in the script's code, unless the
    finding is right: "meant", or "wrong".
    """
    table, (lines, _) = [], read_lines(path)
    ran = [line for line in lines if "crash" not in [f["kind"] for f in line["findings"]]]
    projects = {line["repository"] for line in ran}
    told = [(line, finding) for line in ran for finding in judge.serious(line)]
    wrong = [f for line, f in told if line.get("judged", {}).get(f["kind"]) == "wrong"]
    silent = sum(not judge.serious(line) for line in ran)
    yield paragraph(
        f"""Of {len(ran)} runs of {len({(r["repository"], r["script"]) for r in ran})} scripts from
        {len(projects)} projects, {silent} got neither an ERROR nor a WARN. The others got
        {len(told)}, of which we judge {len(wrong)} wrong."""
    )
    for line in sorted(lines, key=lambda line: line["repository"].lower()):  # stable
        place = f"{line['repository']}/blob/{line['commit']}/{line['script']}"
        marks = {kind: f" ({what})" for kind, what in line.get("judged", {}).items()}
        kinds = [f"{f['level']} *{f['kind']}*{marks.get(f['kind'], '')}" for f in line["findings"]]
        first, *words = line["command"].split()
        how = words[1].split(".")[-1] if first == "python" and words[0] == "-m" else first
        reported = ", ".join(dict.fromkeys(kinds))
        name = f"`{line['repository']}`: [{line['script']}](https://github.com/{place})"
        table.append([name, how.replace("python", ""), str(line["steps"]), reported])
    yield pd.DataFrame(table, columns=["script", "started by", "steps", "reported"])


FILE = "audit.jsonl"
PARTS = [
    Part(PAGE, "summary", FILE, summary),
    Part(PAGE, "pages", FILE, partial(counts, by="page")),
    Part(PAGE, "outcomes", FILE, partial(counts, by="outcome")),
    Part(PAGE, "misses", FILE, misses),
    Part(PAGE, "others", "audit-others.jsonl", others),
]
