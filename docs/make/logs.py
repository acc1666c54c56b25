"""What the pages are made of: the files in logs/, a folder a machine."""

import json
import textwrap
from pathlib import Path

from bench import ROOT
from bench.show.summary import Run

LOGS = ROOT / "logs"


def logged(pattern: str) -> list[Path]:
    """Files below logs/, in order, those of machines with GPUs first (the others have names like
    2-cores-epyc); not those of logs/runs, which are a user's own.
    """
    found = [path for path in sorted(LOGS.glob(pattern)) if LOGS / "runs" not in path.parents]
    return sorted(found, key=lambda path: "-cores-" in path.relative_to(LOGS).parts[0])


def runs(name: str) -> list[Run]:
    """The results of `bench run` in folders with this name, which may have a `*`."""
    return [Run.of(path.parent) for path in logged(f"*/{name}/records.jsonl")]


def named(path: Path) -> str:
    """A file below logs/ as the pages link to it: from the repository's folder on."""
    return path.relative_to(LOGS.parent).as_posix()


def paragraph(text: str) -> str:
    """Text in lines of a page's width."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def lines_of(path: Path) -> list[dict]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
