"""records.jsonl: what was measured, one JSON object a line, only ever appended to.

{"kind": "setting", ...}    once: flags, cases, environment
{"kind": "skip", case, reason}
{"kind": "gate", case, passed, distance, reason}
{"kind": "sample", case, round, order, windows, warm_up, ...}   one launch of a case
{"kind": "failure", case, round, code, reason}
{"kind": "stop", reason}    why no further round was run
"""

import json
import os
from pathlib import Path

KINDS = {"setting", "skip", "gate", "sample", "failure", "stop"}
NAME = "records.jsonl"


class BadRecords(Exception):
    """The file is not there, is empty, or is another program's; the text is for the user."""


def append(folder: Path, kind: str, **fields) -> None:
    """Adds one record, whole and on the disk when this returns."""
    assert kind in KINDS
    line = json.dumps({"kind": kind, **fields}, default=str) + "\n"
    with open(folder / NAME, "a") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> tuple[list[dict], str | None]:
    """All whole records up to the first break, and a warning where there is one.

    Raises BadRecords where there is nothing that could be shown.
    """
    path = folder / NAME
    if not path.is_file():
        raise BadRecords(f"{folder}: no {NAME} there, name a folder that `run` wrote")
    found, warning = [], None
    lines = path.read_text(errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if record["kind"] not in KINDS:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            warning = f"{path}: line {number} is broken, what follows it was not read"
            break
        found.append(record)
    if not found or found[0]["kind"] != "setting":
        raise BadRecords(f"{path}: not a record of `run`, or an empty one")
    return found, warning


def of(records: list[dict], kind: str) -> list[dict]:
    """The records of one kind."""
    return [record for record in records if record["kind"] == kind]
