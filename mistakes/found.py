"""What audit.py finds of the mistakes in docs/diffs/: its records, and how they are judged.

The records are lines of logs/MACHINE/audit.jsonl, written by audited.py. causes.toml says of each
silent mistake which kinds of findings name its cause. It was written before audit.py was run, but
for what it marks as later.
"""

import tomllib
from functools import cache
from pathlib import Path

from bench import ROOT, UserError, records

RECORDS = "*/audit.jsonl"  # below logs/
SERIOUS = ("ERROR", "WARN")
# Judgements, the best first.
CAUSE, HINTED, CONSEQUENCE, MISSED, NOT_RUN = "cause", "hint", "consequence", "missed", "not run"
CAUSES = {"hang": ["hang"], "crash": ["crash"], "NaN": ["not finite"]}  # of loud outcomes


@cache
def causes() -> dict:
    """causes.toml: by page and piece, the kinds that name the cause, or why no kind can; and
    `missed`, by page and piece, why audit.py did not find what it could have found.
    """
    return tomllib.loads((ROOT / "mistakes" / "causes.toml").read_text())


def cause(record: dict) -> list[str] | str:
    """The kinds that name a record's cause, or why none can. Raises UserError for a new piece."""
    page, piece = record["page"], record["piece"]
    named = CAUSES.get(record["outcome"]) or causes().get(page, {}).get(piece)
    if not named:
        raise UserError(
            f"mistakes/causes.toml: [{page}] {piece}: this mistake is silent: name the findings of "
            "audit.py that name it, or why none can"
        )
    return named


def reason(record: dict) -> str:
    """Why a mistake was missed, or not run; "" if nobody has said so."""
    if "reason" in record:
        return record["reason"]
    named = cause(record)
    why = causes().get("missed", {}).get(record["page"], {}).get(record["piece"], "")
    return named if isinstance(named, str) else why


def judged(record: dict, named: list[str] | str) -> str:
    """Whether the findings name the cause; named: the kinds that do, or why no kind can."""
    if "reason" in record and "exit" not in record:
        return NOT_RUN
    levels = {finding["level"] for finding in naming(record, named)}
    if levels & {*SERIOUS}:
        return CAUSE
    if levels:
        return HINTED
    return CONSEQUENCE if serious(record) else MISSED


def serious(record: dict) -> list[dict]:
    """The errors and warnings of a record."""
    return [finding for finding in record.get("findings", []) if finding["level"] in SERIOUS]


def naming(record: dict, named: list[str] | str) -> list[dict]:
    """The findings of a record that name the cause."""
    kinds = [] if isinstance(named, str) else named
    return [finding for finding in record.get("findings", []) if finding["kind"] in kinds]


def latest(path: Path) -> dict[tuple[str, str], dict]:
    """The records of a file by page and piece, of right programs by "" and name.

    Only those of the audit.py that the last one is of.
    """
    lines, _ = records.lines(path)
    return {(r["page"], r["piece"]): r for r in lines if r["audit"] == lines[-1]["audit"]}


@cache
def known() -> dict[tuple[str, str], dict]:
    """The records of all machines; one of a run that took place goes before one of none."""
    found: dict[tuple[str, str], dict] = {}
    for path in sorted((ROOT / "logs").glob(RECORDS)):
        for key, record in latest(path).items():
            if key not in found or "reason" in found[key]:
                found[key] = record
    return found


def mark(page: str, piece: str, outcome: dict) -> str:
    """A sentence on what audit.py reports of a silent mistake; "" without a record of its code."""
    record = known().get((page, piece))
    if outcome["kind"] != "silent" or not record or record.get("code") != outcome.get("code"):
        return ""
    verdict = judged(record, named := cause(record))
    if verdict in (CAUSE, HINTED):
        kinds = dict.fromkeys(finding["kind"] for finding in naming(record, named))
    elif verdict == CONSEQUENCE:
        kinds = dict.fromkeys(finding["kind"] for finding in serious(record))
    else:
        return "`audit.py` does not find it." if verdict == MISSED else ""
    reported = f"`audit.py` reports {' and '.join(f'*{kind}*' for kind in kinds)}"
    return f"{reported}, a consequence." if verdict == CONSEQUENCE else f"{reported}."
