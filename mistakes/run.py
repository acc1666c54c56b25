"""python -m mistakes list and run: the pieces of docs/diffs/, and one of them made before you."""

import argparse
import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from bench import UserError, process, refuse
from bench.process import Failed
from bench.records import write_whole
from mistakes.measure import pages
from mistakes.outcomes import FOLDER, anchor, heading, measured, read
from mistakes.page import Page, parse
from mistakes.trials import Lab, Trial
from mistakes.verdicts import TOLERANCE, Ran, apart, by_step, error, judge

COLORS = {"silent": "red", "NaN": "red", "hang": "yellow", "crash": "magenta"}
LIST = "python -m mistakes list"
WIDTH = 100  # columns of a picture
FIRST = 6  # steps whose losses are shown at least


def number(page: Page, name: str) -> str:
    """The number of the heading that a piece stands under, "" if it has none."""
    found = re.match(r"(\d+)\. ", heading(page, name))
    return found[1] if found else ""


def find(page: str, which: str) -> tuple[Page, str]:
    """A page, and the name of its piece with this name or number. Raises UserError."""
    (path,) = pages(FOLDER, [page])
    if path not in pages(FOLDER):
        raise UserError(f"{page}: this page has no diff: {LIST}")
    found = parse(path)
    for name in measured(found):
        if which in (name, number(found, name)):
            return found, name
    raise UserError(f"{which}: {page} has no such piece to run: {LIST} {page}")


def title(page: Page, name: str) -> str:
    """Where a piece is explained."""
    words = heading(page, name)
    return f"{words}\ndocs/diffs/{page.name}.md#{anchor(words)}"


def colored(kind: str) -> Text:
    """An outcome's kind."""
    return Text(kind, COLORS.get(kind, "green"))


def show(argv: list[str]) -> int:
    """The command `list`; returns the exit code. Raises UserError."""
    parser = argparse.ArgumentParser(
        "mistakes list", description="What can be run, and its outcome."
    )
    parser.error = refuse
    parser.add_argument("names", nargs="*", metavar="PAGE", help="some pages [all]")
    parser.add_argument("--silent", action="store_true", help="only silent mistakes")
    args = parser.parse_args(argv)
    table = Table("page", "number", "name", "piece", "outcome", box=None)
    known = read(FOLDER)
    for page in map(parse, pages(FOLDER, args.names)):
        for name in measured(page):
            kind = known.get(page.name, {}).get(name, {}).get("kind", "not measured")
            if kind == "silent" or not args.silent:
                words = heading(page, name).removeprefix(f"{number(page, name)}. ")
                table.add_row(page.name, number(page, name), name, words, colored(kind))
    Console().print(table)
    return 0


def together(console: Console, **runs: Callable) -> list:
    """The results of some runs at the same time; the keywords are shown, with the time so far."""
    columns = SpinnerColumn(), "{task.description}", TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:

        def work(item):
            task = progress.add_task(item[0].replace("_", " "), total=1)
            result = item[1]()
            progress.advance(task)
            return result

        return process.side_by_side(work, runs.items(), len(runs))


def ready(page: Page, name: str) -> Trial:
    """A piece's trial. Raises UserError if it cannot run here."""
    trial = page.trial(name)
    if reason := trial.missing():
        raise UserError(f"{page.name}: it cannot run here: {reason}")
    return trial


def losses(right: Ran, wrong: Ran, within: float) -> Table:
    """The losses of the first steps side by side, to the first that differs."""
    table = Table("step", "right", "wrong", box=None)
    mine, rows = by_step(wrong, "train"), []
    for step, (record, *_) in by_step(right, "train").items():
        one, two = record["loss"], mine.get(step, [{"loss": None}])[0]["loss"]
        text = "-" if step not in mine else "nan" if two is None else f"{two:.6f}"
        far = apart(one, two) > max(within, TOLERANCE["train"])
        rows.append((str(step), f"{one:.6f}", Text(text, "bold red" if far else "")))
    wrongs = (k for k, row in enumerate(rows) if row[2].style)
    for row in rows[: max(FIRST, next(wrongs, 0) + 1)]:
        table.add_row(*row)
    return table


def run(argv: list[str]) -> int:
    """The command `run`; returns the exit code. Raises UserError."""
    parser = argparse.ArgumentParser("mistakes run", description="Makes a mistake, and compares.")
    parser.error = refuse
    parser.add_argument("page", metavar="PAGE", help="such as mnmc_ddp_launch")
    parser.add_argument("piece", metavar="PIECE", help="the number of its heading, or its name")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the broken script there")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a picture of what is printed")
    args = parser.parse_args(argv)
    page, name = find(args.page, args.piece)
    trial, console = ready(page, name), Console(record=bool(args.svg), width=args.svg and WIDTH)
    if args.out:
        keep(args.out / Path(page.new).name, trial.text)
    whole = page.whole()
    console.print(title(page, name), style="bold", highlight=False)
    lines = difflib.unified_diff(whole.splitlines(), trial.text.splitlines(), lineterm="", n=2)
    console.print(
        Syntax("\n".join([*lines][2:]), "diff", background_color="default", word_wrap=True)
    )
    process.heed_signals()
    try:
        with Lab() as lab:
            right, wrong = together(
                Console(),  # a picture would have every turn of the spinner
                right=lambda: lab.run(replace(trial, text=whole)),
                wrong=lambda: lab.run(trial),
            )
            if right.code or right.stuck is not None:
                raise Failed(f"{page.new} itself fails here: {': '.join(error(right.err))}")
            found = judge(wrong, lambda: right, lambda: right, trial.within)
    except Failed as failed:
        raise UserError(str(failed)) from None
    console.print(losses(right, wrong, trial.within))
    kind = Text(found["kind"].upper(), f"bold {COLORS.get(found['kind'], 'green')}")
    console.print(kind, Text(found["text"]), soft_wrap=not args.svg)
    if args.svg:
        shown = f"python -m mistakes run {args.page} {args.piece}"
        picture = re.sub(r"@font-face {.*?}", "", console.export_svg(title=shown), flags=re.S)
        write_whole(args.svg, picture)  # without rich's fonts, which a browser would download
    return 0


def keep(path: Path, text: str) -> None:
    """Writes a script. Raises UserError if there is one: it may be the reader's own."""
    if path.exists():
        raise UserError(f"{path}: there is such a file: move it, or choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
