"""The tables of docs/evidence/audit.md: what audit.py finds of the mistakes in docs/diffs/."""

from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
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
            early = [finding["step"] for finding in findings if finding["step"]]
            row |= {"judged": judge.judged(record, named), "step": min(early, default=None)}
            row["near"] = near(page, piece, findings)
            row["kind"] = findings[0]["kind"] if findings else None
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


def kinds(path: Path) -> Iterator[Piece]:
    """The kinds of findings that name silent mistakes: of how many, how near, and how early."""
    rows = judgements(path)
    rows = rows[(rows["outcome"] == "silent") & rows["judged"].isin(NAMED)]
    table = []
    for kind, mine in rows.groupby("kind", sort=False):
        table.append([f"*{kind}*", str(len(mine)), str(mine["near"].sum()), steps(mine)])
    table.sort(key=lambda row: -int(row[1]))  # stable
    yield pd.DataFrame(table, columns=["kind", "mistakes", "line near", "first seen in step"])


def steps(rows: pd.DataFrame) -> str:
    """The range of the training steps that findings name."""
    known = rows["step"].dropna()
    ends = sorted({int(known.min()), int(known.max())}) if len(known) else []
    return " to ".join(map(str, ends))


def outcomes(path: Path) -> Iterator[Piece]:
    """A row for each outcome of a mistake."""
    rows, table = judgements(path), []
    for name in KINDS[:-1]:
        mine = rows[rows["outcome"] == name]
        found = Counter(mine["judged"])
        numbers = [str(found[kind] or "") for kind in COLUMNS]
        table.append([name, str(len(mine)), *numbers])
    yield pd.DataFrame(table, columns=["outcome", "mistakes", *COLUMNS.values()])


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


def faulty(lines: list[dict]) -> tuple[int, int]:
    """How many scripts of others have an error, and how many ran. `judged` of a record says what we
    read in the code about each kind of an error or warning: "right", "meant", "wrong" and so on.
    """
    ran, wrong = set(), set()
    for line in lines:
        kinds = {finding["kind"] for finding in line["findings"] if finding["level"] == "ERROR"}
        if "crash" not in kinds:
            script = line["repository"], line["script"]
            ran.add(script)
            wrong |= {script} if "right" in [line["judged"][kind] for kind in kinds] else set()
    return len(wrong), len(ran)


def rightness(lines: list[dict]) -> str:
    """How many errors and warnings are right, by what we read in the code."""
    told = [(line, f["kind"]) for line in lines for f in judge.serious(line)]
    told = [line["judged"][kind] for line, kind in told if kind != "crash"]
    text = f"Of {len(told)} ERRORs and WARNs, {told.count('right')} are right, "
    return f"{text}{told.count('wrong')} wrong, and the others meant or harmless."


def unseen(path: Path) -> Iterator[Piece]:
    """The same of scripts that the audit had not been changed for."""
    lines, _ = read_lines(path)
    scripts = {(line["repository"], line["script"]) for line in lines}
    silent = sum(line["exit"] == 124 for line in lines)  # timeout's
    yield paragraph(
        f"""{len(scripts)} new scripts ({link(path)}). {rightness(lines)} {silent} runs gave no
        report within 500 s."""
    )


def others(path: Path) -> Iterator[Piece]:
    """What the audit reports of scripts of other projects: a row for each project."""
    table, (lines, _) = [], read_lines(path)
    wrong, ran = faulty(lines)
    yield paragraph(
        f"""Of {ran} scripts from {len({line["repository"] for line in lines})} projects,
        {wrong} have an error. {rightness(lines)}"""
    )
    projects: dict[str, dict[str, list[str]]] = {}  # the scripts, by what is reported
    for line in sorted(lines, key=lambda line: line["repository"].lower()):  # stable
        place = f"{line['repository']}/blob/{line['commit']}/{line['script']}"
        judged = line.get("judged", {}).items()
        marks = {kind: f" ({what})" for kind, what in judged if what != "right"}
        kinds = [
            f"{f['level']} *{f['kind']}*{marks.get(f['kind'], '')}" for f in judge.serious(line)
        ]
        reported = ", ".join(dict.fromkeys(kinds)) or "nothing"
        short = "/".join(Path(line["script"]).parts[-2:])
        names = projects.setdefault(line["repository"], {}).setdefault(reported, [])
        names.append(f"[{short}](https://github.com/{place})")
    for project, found in projects.items():
        parts = [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in found.items()]
        table.append([project, "; ".join(parts)])
    yield pd.DataFrame(table, columns=["project", "ERRORs and WARNs"])


FILE = "audit.jsonl"
PARTS = [
    Part(PAGE, "summary", FILE, summary),
    Part(PAGE, "kinds", FILE, kinds),
    Part(PAGE, "outcomes", FILE, outcomes),
    Part(PAGE, "misses", FILE, misses),
    Part(PAGE, "others", "audit-others.jsonl", others),
    Part(PAGE, "unseen", "audit-unseen.jsonl", unseen),
]
