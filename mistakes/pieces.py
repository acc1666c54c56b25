"""python -m mistakes measure: measures what happens without each piece, and writes the pages.

    python -m mistakes measure [PAGE ...]           measures what has changed, and writes
    python -m mistakes measure [PAGE ...] --again   measures everything
    python -m mistakes measure [PAGE ...] --check   no runs; exit code 1 if a page is not up to date

The outcomes are in docs/diffs/outcomes.json, each with a hash of the code that it was measured on.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path

from bench import ROOT, process, refuse
from bench.process import Failed
from bench.records import write_whole
from bench.show.table import markdown
from mistakes.page import BLOCK, BadPage, Page, Piece, fingerprint, parse, place
from mistakes.trials import Lab
from mistakes.verdicts import shown

FOLDER = ROOT / "docs" / "diffs"
OUTCOMES = "outcomes.json"
# Must be in the prose on a piece whose absence has no effect here.
WHY = "**Why the change stays:**"
TABLE = re.compile(r"(<!-- begin outcomes -->\n).*?(<!-- end outcomes -->)", re.S)
KINDS = ["silent", "NaN", "hang", "crash", "no effect here"]  # the worst first
TERMS = "mnmc_ddp_launch.md"  # the page that explains the outcomes
MISSING = {"NameError", "ImportError", "ModuleNotFoundError", "UnboundLocalError"}  # no lesson
MOST, FEW = 12, 8  # lines of a diff that are shown without a fold; and with one
GAP = "@@ ... @@"
AT_ONCE = 2  # runs; the two processes of a run wait for each other a good part of the time


def read(folder: Path) -> dict:
    """The outcomes: of each page, of each piece."""
    path = folder / OUTCOMES
    return json.loads(path.read_text()) if path.exists() else {}


def write(folder: Path, outcomes: dict) -> None:
    """The same outcomes always as the same file."""
    write_whole(folder / OUTCOMES, json.dumps(outcomes, indent=2, sort_keys=True) + "\n")


def current(page: Page, name: str, known: dict) -> bool:
    """Whether there is an outcome of this very code."""
    return known.get(name, {}).get("code") == fingerprint(page.trial(name))


def measured(page: Page) -> list[str]:
    """The pieces whose absence can be run."""
    return [
        name for name, piece in page.pieces.items() if not {"skip", "hide"} & piece.options.keys()
    ]


def measure(page: Page, names: list[str], tell, found: dict) -> list[str]:
    """Adds outcomes of some pieces, from runs, to found; returns what went wrong, a line each."""
    failed = []
    with Lab() as lab, ThreadPoolExecutor(AT_ONCE) as pool:
        trials = {name: page.trial(name) for name in names}
        jobs = {pool.submit(lab.outcome, t, page.whole()): name for name, t in trials.items()}
        try:
            for job in as_completed(jobs):
                name = jobs[job]
                if isinstance(job.exception(), Failed):
                    failed.append(f"{page.path.name}: piece {name}: {job.exception()}")
                    continue
                found[name] = job.result() | {"code": fingerprint(trials[name])}
                tell(f"{page.name}: {name}: {found[name]['kind']}: {found[name]['text']}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            process.end(process.OWNER)
            raise
    return failed


def fence(page: Page, piece: Piece) -> str:
    """The changed lines of a piece, with the unchanged ones next to them."""
    lines, shown = page.lines, []
    ends = [piece.lines[0] - 2, *piece.lines, piece.lines[-1] + 2]
    for before, number in pairwise(ends):
        between = range(max(0, before + 1), min(number, len(lines)))
        inside = before in piece.lines and number in piece.lines
        gap = [lines[n] for n in between if lines[n][0] == " " and (inside or lines[n].strip())]
        if len(gap) > 3:
            gap = [gap[0], GAP, *(line for line in gap[-1:] if line.strip())]
        shown += gap
        shown += [lines[number]] if number in piece.lines else []
    return fenced(shown)


def fenced(lines: list[str]) -> str:
    """Lines of a diff in Markdown."""
    return "\n".join(["```diff", *(line.rstrip() for line in lines), "```"])


def card(page: Page, piece: Piece) -> str:
    """The diff of a piece. If it is longer than MOST lines: first lines of its new code, and the
    whole diff folded.
    """
    whole, numbers = fence(page, piece), piece.lines
    if len(numbers) <= MOST:
        return whole
    lines = {n: page.lines[n] for n in numbers if re.match(r"[+-] *[^ #]", page.lines[n])}
    code = [n for n, line in lines.items() if line[0] == "+"] or [*lines]
    shown, last = [], numbers[0] - 1
    for number in code[:FEW]:
        shown += [GAP] * (number > last + 1) + [page.lines[number]]
        last = number
    shown += [GAP] * (last < numbers[-1])
    head = f"<details><summary>all {len(numbers)} lines</summary>"
    return "\n".join([fenced(shown), "", head, "", whole, "", "</details>"])


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def table(page: Page, known: dict) -> str:
    """What happened, worst first: a row for each piece, with its heading and outcome."""
    rows = []
    for name in measured(page):
        outcome = known.get(name)
        if not outcome or outcome["facts"].get("error") in MISSING:
            continue
        before = page.text.split(f"<!-- piece {name}: ", 1)[0]
        heading = re.findall(r"^### (.*)$", before, re.M)[-1]
        text = re.split(r"[.;:] (?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)", outcome["text"])[0]
        text = text.rstrip(".:") or "no difference in this test"
        rows.append((outcome["kind"], f"[{heading}](#{anchor(heading)})", text))
    if not rows:
        return ""
    rows.sort(key=lambda row: KINDS.index(row[0]))  # stable: else in the order of the diff
    rows = [[shown(kind), *cells] for kind, *cells in rows]
    terms = "outcome" if page.path.name == TERMS else f"[outcome]({TERMS})"
    return f"\n{markdown([[terms, 'piece removed or changed', 'what happened'], *rows])}\n"


def label(page: Page, piece: Piece) -> tuple[str, str, str]:
    """What was changed; how the script was run, or ""; and the changed code of several lines."""
    code = textwrap.dedent("\n".join(closed(page, piece))).splitlines()
    words = "without this change"
    lines = [line for n in piece.lines if re.match(r"[+-] *[^ #]", line := page.lines[n])]
    if piece.instead is None and [line[0] for line in lines] == ["-", "+"]:
        old = plain(lines[0][1:]).strip(" ,")
        words = f"with `{old}` instead"
    if piece.instead == [] and any(page.lines[n][0] == "-" for n in piece.lines):
        words = "with neither the old nor the new lines"
    if gone := left_out(page, piece):
        words = "without the code below" if gone[1:] else f"without `{gone[0].strip()}`"
        code = textwrap.dedent("\n".join(gone)).splitlines()
    elif code:
        words = "with the code below instead" if code[1:] else f"with `{code[0]}` instead"
    for name in piece.options.get("with", []):
        other = page.pieces[name]
        new = other.instead or [page.lines[n][1:] for n in other.lines if page.lines[n][0] == "+"]
        first = next(line.strip() for line in new if not line.strip().startswith("#"))
        words += f", and with{'' if other.instead else 'out'} `{first.split('  # ')[0]}`"
    given, flag = {}, ""
    for word in " ".join(piece.options.get("flags", []) + piece.options.get("own", [])).split():
        flag = word if word.startswith("--") else flag
        given[flag] = word if word == flag else f"{given[flag]} {word}"  # the last one counts
    images = given.pop("--images", None)  # not a flag of the script, but of the run
    how = f"with `{' '.join(given.values())}`" if given else ""
    how += f"{' ' if how else ''}on {images.split()[1]} training images" if images else ""
    if step := piece.one("kill"):
        how += f"; rank 1 was killed in step {step}"
    return words, how, "\n".join(code) if code[1:] else ""


def left_out(page: Page, piece: Piece) -> list[str]:
    """The new lines of a piece that the code instead of it lacks, without comments.

    None where this code has other lines, too, where several lines are gone and others moved, or
    where a docstring is gone.
    """
    new = [page.lines[n][1:] for n in piece.lines if re.match(r"\+ *[^ #]", page.lines[n])]
    kept, gone, moved = [plain(line) for line in piece.instead or []], [], False
    for line in map(plain, new):
        if kept and line.strip() == kept[0].strip():
            moved |= line != kept.pop(0)
        else:
            gone.append(line)
    unclear = kept or (moved and gone[1:]) or any('"""' in line for line in gone)
    return gone if piece.instead and not unclear else []


def plain(line: str) -> str:
    """A line without the comment at its end."""
    return line.split("  # ")[0].rstrip()


def closed(page: Page, piece: Piece) -> list[str]:
    """The code instead of a piece, to the end of its last statement, which may be behind it."""
    code = [*(piece.instead or [])]
    rest = (line[1:] for line in page.lines[place(piece, page.lines) :] if line[0] == " ")
    while sum(line.count("(") - line.count(")") for line in code) > 0:
        code.append(next(rest))
    return code


def block(page: Page, piece: Piece, outcome: dict | None) -> str:
    """The text between the markers of a piece."""
    if "hide" in piece.options:
        return ""
    shown = outcome and "skip" not in piece.options
    return "\n".join([*([told(page, piece, outcome), ""] if shown else []), card(page, piece), ""])


def told(page: Page, piece: Piece, outcome: dict) -> str:
    """An outcome: its kind, what was changed, what happened, and how the script was run."""
    words, how, code = label(page, piece)
    text = f"{shown(outcome['kind'])} {words}."
    if happened := outcome["text"]:
        text += f" {happened[0].upper()}{happened[1:]}"
    text += f" (Run {how}.)" if how else ""
    text += f"\n```python\n{code}\n```" if code else ""
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def render(page: Page, known: dict) -> str:
    """The page with every block made again."""

    def anew(match):
        name = match[5]
        return match[1] + block(page, page.pieces[name], known.get(name)) + match[4]

    text = BLOCK.sub(anew, page.text)
    return TABLE.sub(lambda match: f"{match[1]}{table(page, known)}\n{match[2]}", text)


def problems(page: Page, known: dict) -> list[str]:
    """What is wrong with a page, a line each; no runs."""
    found = []
    if len(TABLE.findall(page.text)) != 1:
        found.append("give it one <!-- begin outcomes --> and <!-- end outcomes -->")
    if render(page, known) != page.text:
        found.append("a block is not up to date: python -m mistakes measure")
    for name in measured(page):
        if name not in known:
            found.append(f"piece {name}: not measured: python -m mistakes measure")
        elif not current(page, name, known):
            found.append(f"piece {name}: measured with other code: python -m mistakes measure")
        elif known[name]["kind"] == "no effect here" and WHY not in prose(page, name):
            found.append(f"piece {name}: no effect here, so say {WHY}")
    if left := known.keys() - set(measured(page)):
        found.append(
            f"{OUTCOMES} has {left.pop()}, which the page lacks: python -m mistakes measure"
        )
    return found


def prose(page: Page, name: str) -> str:
    """The text from a piece's end to the next piece."""
    after = page.text.split(f"<!-- end {name} -->", 1)[1]
    return after.split("<!-- piece ", 1)[0]


def check(folder: Path, names: Sequence[str] = ()) -> list[str]:
    """What is wrong with the pages of a folder, a line each; no runs."""
    outcomes, paths, found = read(folder), pages(folder, names), []
    if gone := sorted(outcomes.keys() - {path.stem for path in pages(folder)}):
        found.append(f"{OUTCOMES}: {gone[0]}: there is no such page with a diff")
    for path in paths:
        try:
            page = parse(path)
            found += [
                f"{path.name}: {line}" for line in problems(page, outcomes.get(page.name, {}))
            ]
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


def update(path: Path, again: bool, tell) -> list[str]:
    """Measures what is due of a page, and writes it and its outcomes. Raises BadPage.

    Returns what went wrong with pieces, which keep their old outcomes, a line each.
    """
    page = parse(path)
    known = read(path.parent).get(page.name, {})
    due = [name for name in measured(page) if again or not current(page, name, known)]
    if due and (reason := page.trial(due[0]).missing()):
        tell(f"{page.name}: left as measured before: {reason}: {', '.join(due)}")
        due = []
    new: dict = {}
    try:
        return measure(page, due, tell, new) if due else []
    finally:  # minutes of work, which an error or Ctrl-C in another piece must not lose
        found = {name: (known | new)[name] for name in measured(page) if name in known | new}
        kept = read(path.parent) | {page.name: found}
        there = {path.stem for path in pages(path.parent)}
        write(path.parent, {name: kept[name] for name in kept if name in there})
        write_whole(path, render(parse(path), found))  # the prose may have changed in the meantime


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
