"""Files in logs/, which has a folder for each machine, and the parts of pages made from them."""

import json
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from bench import ROOT
from bench.show.summary import Run
from bench.show.table import markdown

LOGS = ROOT / "logs"
Piece = str | pd.DataFrame


def logged(pattern: str) -> list[Path]:
    """Files below logs/, in order, those of machines with GPUs first (the others have names like
    2-cores-epyc); not those of logs/runs, which are a user's own.
    """
    found = [(path.relative_to(LOGS).parts[0], path) for path in sorted(LOGS.glob(pattern))]
    found = [(machine, path) for machine, path in found if machine != "runs"]
    return [path for _, path in sorted(found, key=lambda each: "-cores-" in each[0])]


@cache
def read_run(folder: Path) -> Run:
    """A result of `bench run`, which several parts of pages show."""
    return Run.of(folder)


def runs(name: str) -> list[Run]:
    """The results of `bench run` in folders with this name, which may have a `*`."""
    return [read_run(path.parent) for path in logged(f"*/{name}/records.jsonl")]


def lines_of(path: Path) -> list[dict]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def named(path: Path) -> str:
    """A file below logs/ as README.md links to it."""
    return path.relative_to(LOGS.parent).as_posix()


def link(path: Path, words: str = "log") -> str:
    """A link to a file below logs/ from the pages in the folders of docs/."""
    return f"[{words}](../../{named(path)})"


def paragraph(text: str) -> str:
    """Text in lines of a page's width."""
    text = " ".join(text.split())
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


class Part(NamedTuple):
    """A generated part of a page: what `show` makes of each of the files, below logs/MACHINE/."""

    page: str
    name: str
    files: str
    show: Callable[[Path], Iterator[Piece]]

    def text(self) -> str:
        """The part as Markdown."""
        pieces = [piece for path in logged(f"*/{self.files}") for piece in self.show(path)]
        texts = [x if isinstance(x, str) else markdown([[*x], *x.values]) for x in pieces]
        return "\n\n".join(texts)


class Made(NamedTuple):
    """A generated part that is made of no file in logs/; text: its Markdown."""

    page: str
    name: str
    text: Callable[[], str]
