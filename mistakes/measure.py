"""python -m mistakes measure: measures what happens without each piece, and writes the pages.

    python -m mistakes measure [PAGE ...]             measures what is stale, and writes
    python -m mistakes measure [PAGE ...] --again     measures everything
    python -m mistakes measure [PAGE ...] --check     no runs; exit code 1 if something is stale

An outcome is stale if the code that ran, the oracle, the probe or torch's minor version is another
now. Comments, docstrings and help texts do not count.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from bench import ROOT, process, refuse
from bench.process import Failed
from bench.records import write_whole
from mistakes.outcomes import FOLDER, OUTCOMES, TABLE, measured, read, render, settings, write
from mistakes.page import BadPage, Page, essence, fingerprint, parse
from mistakes.trials import Lab

# Must be in the prose on a piece whose absence has no effect here.
WHY = "**Why the change stays:**"
COMMAND = "python -m mistakes measure"
FILES = {"oracle": "bench/oracle.py", "probe": "bench/run/probe.py"}
AT_ONCE = 2  # runs; the two processes of a run wait for each other a good part of the time


def short(about: dict[str, str]) -> str:
    """The name of a setting: a hash."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


@cache
def code(text: str) -> str:
    """A hash of a program without its comments, docstrings and help texts."""
    return hashlib.sha256(essence(text).encode()).hexdigest()[:12]


def setting(page: Page, installed: bool = True) -> dict[str, str]:
    """What decides a page's outcomes beside its scripts. OneFlow's runs use none of it.

    installed: with the torch that is here, not with the one that the project asks for.
    """
    if page.script.in_oneflow:
        return {}
    torch = metadata.version("torch") if installed else ""
    if not installed:
        torch = re.search(r"^torch==(\S+)", (ROOT / "requirements/torch.lock").read_text(), re.M)[1]
    found = {name: code((ROOT / file).read_text()) for name, file in FILES.items()}
    return found | {"torch": ".".join(torch.split(".")[:2])}


def stale(page: Page, name: str, known: dict, kept: dict) -> list[str]:
    """What is another now than when a piece was measured, in words; known: the page's outcomes."""
    if name not in known:
        return ["not measured"]
    if known[name]["code"] != fingerprint(page.trial(name)):
        return ["measured with other code"]
    then, now = kept[known[name]["with"]], setting(page, installed=False)
    changed = [what for what in now if then.get(what) != now[what]]
    return [f"measured with another {FILES.get(what, what)}" for what in changed]


def measure(page: Page, names: list[str], tell, found: dict) -> list[str]:
    """Adds outcomes of some pieces, from runs, to found; returns what went wrong, a line each."""
    failed, key = [], short(setting(page))

    def work(name: str) -> None:
        trial = page.trial(name)
        try:
            outcome = lab.outcome(trial, page.whole())
        except Failed as error:
            failed.append(f"{page.path.name}: piece {name}: {error}")
            return
        outcome = json.loads(json.dumps(outcome))  # as it will be read
        found[name] = outcome | {"code": fingerprint(trial), "with": key}
        tell(f"{page.name}: {name}: {outcome['kind']}: {outcome['text']}")

    with Lab() as lab:
        process.side_by_side(work, names, AT_ONCE)
    return failed


def problems(page: Page, known: dict, kept: dict) -> list[str]:
    """What is wrong with a page, a line each; no runs."""
    found = []
    if len(TABLE.findall(page.text)) != 1:
        found.append("give it one <!-- begin outcomes --> and <!-- end outcomes -->")
    if render(page, known) != page.text:
        found.append(f"a block is not up to date: {COMMAND}")
    for name in measured(page):
        if why := stale(page, name, known, kept):
            found.append(f"piece {name}: {', '.join(why)}: {COMMAND}")
        elif known[name]["kind"] == "no effect here" and WHY not in prose(page, name):
            found.append(f"piece {name}: no effect here, so say {WHY}")
    if left := known.keys() - set(measured(page)):
        found.append(f"{OUTCOMES} has {left.pop()}, which the page lacks: {COMMAND}")
    return found


def prose(page: Page, name: str) -> str:
    """The text from a piece's end to the next piece."""
    after = page.text.split(f"<!-- end {name} -->", 1)[1]
    return after.split("<!-- piece ", 1)[0]


def check(folder: Path, names: Sequence[str] = ()) -> list[str]:
    """What is wrong with the pages of a folder, a line each; no runs."""
    outcomes, kept, paths, found = read(folder), settings(folder), pages(folder, names), []
    if gone := sorted(outcomes.keys() - {path.stem for path in pages(folder)}):
        found.append(f"{OUTCOMES}: {gone[0]}: there is no such page with a diff")
    for path in paths:
        try:
            page = parse(path)
            lines = problems(page, outcomes.get(page.name, {}), kept)
            found += [f"{path.name}: {line}" for line in lines]
        except BadPage as error:
            found.append(f"{path.name}: {error}")
    return found


def pages(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The pages of these names, or all that have a diff. Raises BadPage."""
    if not names:
        return [p for p in sorted(folder.glob("*.md")) if "<!-- diff " in p.read_text()]
    paths = [folder / f"{Path(name).stem}.md" for name in names]
    for path in paths:
        if not path.exists():
            raise BadPage(f"{path.stem}: there is no such page")
    return paths


def save(page: Page, new: dict) -> None:
    """Writes new outcomes of a page, and the page."""
    folder = page.path.parent
    kept, known = read(folder), settings(folder)
    known[short(setting(page))] = setting(page)
    found = kept.get(page.name, {}) | new
    found = {name: found[name] for name in measured(page) if name in found}
    there = {path.stem for path in pages(folder)}
    kept = {name: each for name, each in (kept | {page.name: found}).items() if name in there}
    write(folder, kept, known)
    write_whole(page.path, render(parse(page.path), found))  # its prose may have changed meanwhile


def update(path: Path, again: bool, tell) -> list[str]:
    """Measures what is stale on a page, and writes it and its outcomes. Raises BadPage.

    Returns what went wrong with pieces, which keep their old outcomes, a line each.
    """
    page = parse(path)
    known, kept = read(path.parent).get(page.name, {}), settings(path.parent)
    due = [name for name in measured(page) if again or stale(page, name, known, kept)]
    if due and (reason := page.trial(due[0]).missing()):
        tell(f"{page.name}: left as measured before: {reason}: {', '.join(due)}")
        due = []
    new: dict = {}
    try:
        return measure(page, due, tell, new) if due else []
    finally:  # minutes of work, which an error or Ctrl-C in another piece must not lose
        save(page, new)


def main(argv: list[str], folder: Path = FOLDER) -> int:
    """The command; returns the exit code. Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="mistakes measure", description=__doc__.partition("\n")[0]
    )
    parser.error = refuse
    parser.add_argument("names", nargs="*", metavar="PAGE", help="some pages [all]")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--again", action="store_true", help="measure everything")
    ways.add_argument("--check", action="store_true", help="no runs; 1 if a page is out of date")
    args = parser.parse_args(argv)

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    failed = []
    if args.check:
        failed = check(folder, args.names)
    else:
        process.heed_signals()  # so that the runs end, too
        for path in pages(folder, args.names):
            try:
                failed += update(path, args.again, tell)
            except BadPage as error:
                raise BadPage(f"{path.name}: {error}") from None
    for line in failed:
        tell(f"mistakes measure: {line}")
    return int(bool(failed))
