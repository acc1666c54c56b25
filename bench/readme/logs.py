"""What the pages are made of: the files in logs/, a folder a machine."""

import json
import re
from pathlib import Path

from bench import ROOT

LOGS = ROOT / "logs"


def text_table(rows: list[list[str]]) -> str:
    """A table in GitHub's Markdown; the first row names the columns, numbers go to the right."""
    head, *body = rows
    numbers = [
        all(re.fullmatch(r"[\d.,]*%?", cell) for cell in column)
        for column in zip(*body, strict=True)
    ]
    line = ["---:" if right else "---" for right in numbers]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, line, *body])


def logged(pattern: str) -> list[Path]:
    """Files below logs/, in order; not those of logs/runs, which are a user's own."""
    return [path for path in sorted(LOGS.glob(pattern)) if LOGS / "runs" not in path.parents]


def lines_of(path: Path) -> list[dict]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
