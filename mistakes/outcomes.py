"""The outcomes of a page's pieces, and how the page shows them.

The outcomes are in docs/diffs/outcomes.json: of each page, of each piece. Each has a hash of the
code that ran (`code`), and names the setting that it ran with (`with`), which `settings` has.
"""

import ast
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from textwrap import dedent, fill

from bench import ROOT
from bench.records import write_whole
from bench.show.table import markdown
from mistakes.found import mark
from mistakes.page import BLOCK, Page, Piece
from mistakes.trials import Trial
from mistakes.verdicts import shown

FOLDER = ROOT / "docs" / "diffs"
OUTCOMES, SETTINGS = "outcomes.json", "settings"
TABLE = re.compile(r"(<!-- begin outcomes -->\n).*?(<!-- end outcomes -->)", re.S)
KINDS = ["silent", "NaN", "hang", "crash", "no effect here"]  # the worst first
TERMS = "mnmc_ddp_launch.md"  # the page that explains the outcomes
MISSING = {"NameError", "ImportError", "ModuleNotFoundError", "UnboundLocalError"}  # no lesson
MANY = 10  # pieces of a page that begins with a table of them
MOST, FEW = 16, 14  # lines of a piece that are shown whole; and of a longer one
COMMENT = re.compile(r" *(#|$)")  # a line that is one, or empty
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef
GAP = "@@ ... @@"
SENTENCE = re.compile(r"\. (?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)")  # its end, outside of code


def read(folder: Path) -> dict:
    """The outcomes: of each page, of each piece."""
    return {name: page for name, page in everything(folder).items() if name != SETTINGS}


def settings(folder: Path) -> dict:
    """The settings that outcomes name: the hashes of the oracle and the probe, torch's version."""
    return everything(folder).get(SETTINGS, {})


def everything(folder: Path) -> dict:
    """What the file has, {} if there is none."""
    path = folder / OUTCOMES
    return json.loads(path.read_text()) if path.exists() else {}


def write(folder: Path, outcomes: dict, known: dict) -> None:
    """The outcomes, and those of the known settings that they name; always as the same file."""
    named = {outcome["with"] for page in outcomes.values() for outcome in page.values()}
    kept = {key: known[key] for key in named}
    text = json.dumps(outcomes | {SETTINGS: kept}, indent=2, sort_keys=True)
    write_whole(folder / OUTCOMES, text + "\n")


def measured(page: Page) -> list[str]:
    """The pieces whose absence can be run."""
    return [
        name for name, piece in page.pieces.items() if not {"skip", "hide"} & piece.options.keys()
    ]


def fence(page: Page, piece: Piece) -> str:
    """The changed lines of a piece, with the unchanged ones before and between them, as Markdown.

    Without the old code's comments, which its own page shows. Of a piece longer than MOST lines:
    its new code without comments, or the first lines of that.
    """
    old = [n for n in piece.lines if re.match("-" + COMMENT.pattern, page.lines[n])]
    kept = [n for n in piece.lines if n not in old] or piece.lines
    if kept[MOST:]:
        code = [n for n in kept if not COMMENT.match(page.lines[n][1:])]
        new = [n for n in code if page.lines[n][0] == "+"] or code
        kept = new[:FEW] if new[MOST:] else new
    lines, found = page.lines, []
    for before, number in pairwise([piece.lines[0] - 2, *kept]):
        between = range(max(0, before + 1), number)
        inside = before in kept
        gap = [lines[n] for n in between if lines[n][0] == " " and (inside or lines[n].strip())]
        if len(gap) > 3:
            gap = [gap[0], GAP, *(line for line in gap[-1:] if line.strip())]
        found += [*gap, lines[number]]
    if more := len({*piece.lines} - {*kept, *old}):
        found.append(f"... {more} more line{'s' * (more > 1)}")
    return "\n".join(["```diff", *(line.rstrip() for line in found), "```"])


def heading(page: Page, name: str) -> str:
    """The heading that a piece stands under, "" if there is none."""
    before = page.text.split(f"<!-- piece {name}: ", 1)[0]
    return (re.findall(r"^### (.*)$", before, re.M) or [""])[-1]


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def table(page: Page, known: dict) -> str:
    """How the pieces were run. On a page of many, before it: a row for each kind of outcome, worst
    first, with the headings of its pieces.
    """
    rows: dict[str, list[str]] = {}
    for name in measured(page):
        outcome = known.get(name)
        if outcome and outcome["facts"].get("error") not in MISSING:
            words = heading(page, name)
            rows.setdefault(outcome["kind"], []).append(f"[{words}](#{anchor(words)})")
    if not rows:
        return ""
    without = "what happened without a piece"
    without = without if page.path.name == TERMS else f"[{without}]({TERMS})"
    text = f"`python -m mistakes run {page.name} NUMBER` repeats {without}"
    text += f", {words}." if (words := described(page.flags)) else "."
    text = fill(text, 100, break_on_hyphens=False)
    if sum(map(len, rows.values())) >= MANY:
        body = [[shown(k), " · ".join(dict.fromkeys(rows[k]))] for k in KINDS if k in rows]
        text = f"{markdown([['outcome', 'piece removed or changed'], *body])}\n\n{text}"
    return f"\n{text}\n"


def code_lines(text: str) -> list[str]:
    """The lines of a script without comments, docstrings and empty lines."""
    with suppress(SyntaxError):
        tree, lines = ast.parse(text), text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
                first, last = node.body[0].lineno, node.body[0].end_lineno
                lines[first - 1 : last] = [""] * (last - first + 1)
        text = "\n".join(lines)
    lines = (line.split("  # ")[0].rstrip() for line in text.splitlines())
    return [line for line in lines if not COMMENT.match(line)]


def differs(page: Page, name: str) -> tuple[list[str], list[list[str]]]:
    """The lines of code that the run without a piece lacked, and those it had instead, by place."""
    whole, run = code_lines(page.whole()), code_lines(page.mutated(name))
    gone, come = [], []
    for kind, *ends in SequenceMatcher(None, whole, run, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        gone += whole[ends[0] : ends[1]]
        more = iter(run[ends[3] :])
        lines = run[ends[2] : ends[3]]
        while lines and sum(line.count("(") - line.count(")") for line in lines) > 0:
            lines.append(next(more))  # the rest of a statement
        come += [lines] if lines else []
    return gone, come


def label(page: Page, piece: Piece) -> tuple[str, str]:
    """What was changed, in words, and the code that ran instead if it has several lines."""
    gone, come = differs(page, piece.name)
    if [len(lines) for lines in come] == [1]:
        return f"with `{come[0][0].strip(' ,')}` instead", ""
    if come and piece.instead is not None:
        return "with these lines instead", "\n...\n".join(dedent("\n".join(x)) for x in come)
    one = not come and len(gone) == 1
    return f"without `{gone[0].strip(' ,')}`" if one else "without this change", ""


def by_flag(words: Iterable[str]) -> dict[str, str]:
    """The words of a command line by their flags; of a flag that is given twice, the last ones."""
    given, flag = {}, ""
    for word in words:
        flag = word if word.startswith("--") else flag
        given[flag] = word if word == flag else f"{given[flag]} {word}"
    return given


def described(flags: Iterable[str]) -> str:
    """Flags of a run in words; "" if there are none."""
    given = by_flag(flags)
    images = given.pop("--images", None)  # not a flag of the script, but of the run
    words = [f"with `{' '.join(given.values())}`"] if given else []
    words += [f"on {images.split()[1]} training images"] if images else []
    return ", ".join(words)


def how(page: Page, trial: Trial) -> str:
    """How a run was started and ended, in words; "" if as all runs of its page."""
    usual = by_flag(page.flags)
    given = by_flag(trial.flags + trial.own)
    own = " ".join(words for flag, words in given.items() if words != usual.get(flag))
    words = [described(own.split())] if own else []
    words += [f"with rank 1 killed in step {trial.kill}"] if trial.kill else []
    return ", ".join(words)


def told(page: Page, piece: Piece, outcome: dict) -> str:
    """An outcome in four sentences at most: what was changed, what happened, how it was run, and
    whether audit.py finds it.

    One without an effect in one line.
    """
    words, code = label(page, piece)
    none = outcome["kind"] == "no effect here"
    text = f"{shown(outcome['kind'])} {'without this change' if none and code else words}."
    if happened := SENTENCE.split(outcome["text"])[0].rstrip("."):
        happened = re.sub(r"(?<!\.)\.`$", "`", happened)
        text += f" {happened[0].upper()}{happened[1:]}."
    if none:
        return f"> {text}"
    text += f" (Run {run}.)" if (run := how(page, page.trial(piece.name))) else ""
    text += f" {found}" if (found := mark(page.name, piece.name, outcome)) else ""
    if code:
        text += f"\n```python\n{code}\n```"
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def block(page: Page, piece: Piece, outcome: dict | None) -> str:
    """The text between the markers of a piece."""
    if "hide" in piece.options:
        return ""
    shown = outcome and "skip" not in piece.options
    return "\n".join([*([told(page, piece, outcome), ""] if shown else []), fence(page, piece), ""])


def render(page: Page, known: dict) -> str:
    """The page with every block made again."""

    def anew(match):
        name = match[5]
        return match[1] + block(page, page.pieces[name], known.get(name)) + match[4]

    text = BLOCK.sub(anew, page.text)
    return TABLE.sub(lambda match: f"{match[1]}{table(page, known)}\n{match[2]}", text)
