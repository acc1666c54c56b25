"""python -m bench pieces: measures what happens without each piece, and writes the pages again.

    python -m bench pieces [PAGE ...]           measures what has changed, and writes
    python -m bench pieces [PAGE ...] --again   measures everything
    python -m bench pieces [PAGE ...] --check   no runs; exit code 1 where a page is not up to date

The outcomes are in docs/ladder/outcomes.json, each with a hash of the code that it was measured on.
"""

import json
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path

from bench import ROOT
from bench.measure import process as launch
from bench.pieces.page import BLOCK, BadPage, Page, Piece, fingerprint, parse, place
from bench.pieces.trials import Failed, Lab
from bench.results.table import replace

FOLDER = ROOT / "docs" / "ladder"
OUTCOMES = "outcomes.json"
WHY = "**Why it stays:**"  # begins what the prose on a piece says of which nothing can be seen
AT_ONCE = 2  # runs; each of two processes, which wait for each other a good part of the time


def read(folder: Path) -> dict:
    """The outcomes: of each page, of each piece."""
    path = folder / OUTCOMES
    return json.loads(path.read_text()) if path.exists() else {}


def write(folder: Path, outcomes: dict) -> None:
    """The same outcomes always as the same file."""
    replace(folder / OUTCOMES, json.dumps(outcomes, indent=2, sort_keys=True) + "\n")


def current(page: Page, name: str, known: dict) -> bool:
    """Whether there is an outcome of this very code."""
    return known.get(name, {}).get("code") == fingerprint(page.trial(name))


def measured(page: Page) -> list[str]:
    """The pieces that can be run without."""
    return [name for name, piece in page.pieces.items() if "skip" not in piece.options]


def measure(page: Page, names: list[str], tell=lambda line: None) -> dict:
    """The outcomes of some pieces, from runs. Raises Failed."""
    found = {}
    with Lab() as lab, ThreadPoolExecutor(AT_ONCE) as pool:
        trials = {name: page.trial(name) for name in names}
        jobs = {pool.submit(lab.outcome, t, page.whole()): name for name, t in trials.items()}
        try:
            for job in as_completed(jobs):
                name = jobs[job]
                if isinstance(job.exception(), Failed):
                    raise Failed(f"piece {name}: {job.exception()}")
                found[name] = job.result() | {"code": fingerprint(trials[name])}
                tell(f"{page.name}: {name}: {found[name]['kind']}: {found[name]['text']}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            launch.end(launch.OWNER)
            raise
    return found


def fence(page: Page, piece: Piece) -> str:
    """The changed lines of a piece, with the unchanged ones next to them."""
    lines, shown = page.lines, []
    ends = [piece.lines[0] - 2, *piece.lines, piece.lines[-1] + 2]
    for before, number in pairwise(ends):
        between = range(max(0, before + 1), min(number, len(lines)))
        inside = before in piece.lines and number in piece.lines
        gap = [lines[n] for n in between if lines[n][0] == " " and (inside or lines[n].strip())]
        if len(gap) > 3:
            gap = [gap[0], "@@ ... @@", *(line for line in gap[-1:] if line.strip())]
        shown += gap
        shown += [lines[number]] if number in piece.lines else []
    return "\n".join(["```diff", *(line.rstrip() for line in shown), "```"])


def label(page: Page, piece: Piece) -> tuple[str, str]:
    """What was run: the words before the outcome, and code of several lines."""
    code = textwrap.dedent("\n".join(closed(page, piece))).splitlines()
    head = "Without it"
    if code:
        head = "With this in its place" if code[1:] else f"With `{code[0]}` in its place"
    for name in piece.options.get("with", []):
        new = [n for n in page.pieces[name].lines if page.lines[n][0] == "+"]
        first = next(line for n in new if not (line := page.lines[n][1:].strip()).startswith("#"))
        head += f", and without `{first.split('  # ')[0]}`"
    if flags := " ".join(piece.options.get("flags", []) + piece.options.get("own", [])):
        head += f", run with `{flags}`"
    if step := piece.one("kill"):
        head += f" and process 1 killed in step {step}"
    return head, "\n".join(code) if code[1:] else ""


def closed(page: Page, piece: Piece) -> list[str]:
    """The code in place of a piece, to the end of its last statement, which may stand behind it."""
    code = [*(piece.instead or [])]
    rest = (line[1:] for line in page.lines[place(piece, page.lines) :] if line[0] == " ")
    while sum(line.count("(") - line.count(")") for line in code) > 0:
        code.append(next(rest))
    return code


def block(page: Page, piece: Piece, outcome: dict | None) -> str:
    """What stands between the markers of a piece."""
    parts = [fence(page, piece)]
    if outcome and "skip" not in piece.options:
        head, code = label(page, piece)
        text = f"**{head}:** {outcome['text']}"
        if code:
            rest = outcome["text"][0].upper() + outcome["text"][1:]
            text = f"**{head}:**\n\n```python\n{code}\n```\n\n{rest}"
        parts.append("\n".join(f"> {line}".rstrip() for line in text.splitlines()))
    return "\n" + "\n\n".join(parts) + "\n\n"


def render(page: Page, known: dict) -> str:
    """The page with every block made anew."""

    def anew(match):
        name = match[5]
        return match[1] + block(page, page.pieces[name], known.get(name)) + match[4]

    return BLOCK.sub(anew, page.text)


def problems(page: Page, known: dict) -> list[str]:
    """What is wrong with a page, a line each; no runs."""
    found = []
    if render(page, known) != page.text:
        found.append("a block is not up to date: python -m bench pieces")
    for name in measured(page):
        if name not in known:
            found.append(f"piece {name}: not measured: python -m bench pieces")
        elif not current(page, name, known):
            found.append(f"piece {name}: measured with other code: python -m bench pieces")
        elif known[name]["kind"] == "same" and WHY not in prose(page, name):
            found.append(f"piece {name}: nothing shows without it, say {WHY}")
    if left := known.keys() - set(measured(page)):
        found.append(f"{OUTCOMES} has {left.pop()}, the page has not: python -m bench pieces")
    return found


def prose(page: Page, name: str) -> str:
    """The text from a piece's end to the next piece."""
    after = page.text.split(f"<!-- end {name} -->", 1)[1]
    return after.split("<!-- piece ", 1)[0]


def check(folder: Path = FOLDER, names: list[str] | None = None) -> list[str]:
    """What is wrong with the pages of a folder, a line each; no runs."""
    outcomes, paths, found = read(folder), pages(folder, names or []), []
    if gone := sorted(outcomes.keys() - {path.stem for path in folder.glob("*.md")}):
        found.append(f"{OUTCOMES}: {gone[0]}: there is no such page")
    for path in paths:
        try:
            page = parse(path)
            found += [
                f"{path.name}: {line}" for line in problems(page, outcomes.get(page.name, {}))
            ]
        except BadPage as error:
            found.append(f"{path.name}: {error}")
    return found


def pages(folder: Path, names: list[str]) -> list[Path]:
    """The pages of these names, or all that have a diff. Raises BadPage."""
    if not names:
        return [p for p in sorted(folder.glob("*.md")) if "<!-- diff " in p.read_text()]
    paths = [folder / f"{Path(name).stem}.md" for name in names]
    for path in paths:
        if not path.exists():
            raise BadPage(f"{path.stem}: there is no such page")
    return paths


def update(path: Path, again: bool, tell) -> None:
    """Measures a page where that is due, and writes it and its outcomes. Raises BadPage, Failed."""
    page = parse(path)
    known = read(path.parent).get(page.name, {})
    due = [name for name in measured(page) if again or not current(page, name, known)]
    if due and (reason := page.trial(due[0]).missing()):
        tell(f"{page.name}: left as measured before: {reason}: {', '.join(due)}")
        due = []
    found = known | (measure(page, due, tell) if due else {})
    found = {name: found[name] for name in measured(page) if name in found}
    kept = read(path.parent) | {page.name: found}
    write(path.parent, {name: kept[name] for name in kept if path.with_stem(name).exists()})
    replace(path, render(parse(path), found))  # the prose may have changed in the meantime


def main(argv: list[str], folder: Path = FOLDER) -> int:
    """The command; returns the exit code."""
    flags = {word for word in argv if word.startswith("-")}
    names = [word for word in argv if word not in flags]

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if flags - {"--check", "--again"} or len(flags) > 1:
        tell(f"bench pieces: {' '.join(sorted(flags))}: give --check or --again or no flag")
        return 2
    try:
        if flags == {"--check"}:
            found = check(folder, names)
            for line in found:
                tell(line)
            return int(bool(found))
        for path in pages(folder, names):
            try:
                update(path, bool(flags), tell)
            except (BadPage, Failed) as error:
                raise type(error)(f"{path.name}: {error}") from None
    except (BadPage, Failed) as error:
        tell(f"bench pieces: {error}")
        return 2 if isinstance(error, BadPage) else 1
    return 0
