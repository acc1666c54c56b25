"""Two scripts side by side, with what happened without each change: a page of the site, as HTML."""

import re
from difflib import SequenceMatcher
from html import escape
from itertools import groupby

from bench import ROOT
from bench.pages.page import BLOCK, Page

CONTEXT = 3  # unchanged lines shown around a change
LIKE = 0.5  # a removed and an added line this similar stand beside each other


def beside(old: list[str], new: list[str]) -> list[tuple[int | None, int | None]]:
    """Rows of a change: each removed line beside the next added one that is like it."""
    rows, at = [], 0
    for k, line in enumerate(old):
        ratios = [SequenceMatcher(None, line.strip(), n.strip()).ratio() for n in new[at:]]
        if ratios and max(ratios) > LIKE:
            found = at + ratios.index(max(ratios))
            rows += [(None, n) for n in range(at, found)] + [(k, found)]
            at = found + 1
        else:
            rows.append((k, None))
    return rows + [(None, n) for n in range(at, len(new))]


def changed_words(old: str, new: str) -> tuple[set[int], set[int]]:
    """The columns of each line in which they differ, by whole words."""
    words = [re.findall(r"\w+|\s+|.", line) for line in (old, new)]
    marks = set(), set()
    for kind, *ends in SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for side in (0, 1) if kind != "equal" else ():
            first, last = (len("".join(words[side][:n])) for n in ends[2 * side : 2 * side + 2])
            marks[side].update(range(first, last))
    return marks


def tokens(text: str) -> list[list[tuple[str, str]]]:
    """A script's lines as (class of Pygments, text)."""
    from pygments.lexers import PythonLexer
    from pygments.token import STANDARD_TYPES

    lines = [[]]
    for kind, value in PythonLexer(stripnl=False).get_tokens(text):
        for k, part in enumerate(value.split("\n")):
            lines += [[]] if k else []
            lines[-1].append((STANDARD_TYPES.get(kind, ""), part))
    return lines


def cell(side: str, number: int, line: list[tuple[str, str]], marks: set[int]) -> str:
    """A line of a script with these columns marked; number: from 0."""
    parts, column = [], 0
    for kind, value in line:
        for marked, some in groupby(enumerate(value, column), lambda each: each[0] in marks):
            text = f'<span class="{kind}">{escape("".join(c for _, c in some))}</span>'
            parts.append(f"<mark>{text}</mark>" if marked else text)
        column += len(value)
    return f'<code class="{side}" data-line="{number + 1}">{"".join(parts)}</code>'


def cards(page: Page) -> dict[str, str]:
    """What happened without each piece, by the piece's name."""
    from markdown_it import MarkdownIt

    found, inline = {}, MarkdownIt().renderInline
    for match in BLOCK.finditer(page.text):
        told = " ".join(line[2:] for line in match[3].splitlines() if line.startswith("> "))
        if told:
            heading = re.findall(r"^#+ (.*)", page.text[: match.start()], re.M)[-1]
            link = f"../docs/diffs/{page.name}.html#piece-{match[5]}"
            title = f'<a href="{link}">{inline(heading)}</a>'
            found[match[5]] = f'<aside class="card">{title}<p>{inline(told)}</p></aside>'
    return found


def runs(page: Page) -> list[tuple[str | None, list[int]]]:
    """Runs of line numbers: (None, unchanged lines) or (a piece's name, its lines there)."""
    owner = {n: name for name, piece in page.pieces.items() for n in piece.lines}
    return [(name, list(some)) for name, some in groupby(range(len(page.lines)), owner.get)]


def side_by_side(page: Page, old: str, new: str) -> str:
    """The body of a pair's page."""
    left, right = (tokens((ROOT / name).read_text()) for name in (old, new))
    places, at = [], (0, 0)  # of a line of the diff: its number in each script
    for line in page.lines:
        places.append(at)
        at = at[0] + (line[0] != "+"), at[1] + (line[0] != "-")

    def row(a: int | None, b: int | None, changed: bool) -> str:
        """A row of two lines, by their numbers in the diff."""
        marks = set(), set()
        if changed and a is not None and b is not None:
            marks = changed_words(page.lines[a][1:], page.lines[b][1:])
        cells = ""
        for side, n, lines in (("old", a, left), ("new", b, right)):
            number = None if n is None else places[n][side == "new"]
            marked = marks[side == "new"]
            cells += "<i></i>" if n is None else cell(side, number, lines[number], marked)
        return f'<div class="row">{cells}</div>'

    told, parts, every = cards(page), [], runs(page)
    for k, (name, lines) in enumerate(every):
        if name is None:
            rows = [row(n, n, False) for n in lines]
            first = CONTEXT if k else 0
            last = len(rows) - (CONTEXT if k < len(every) - 1 else 0)
            if last > first + 1:
                folded = f"<summary>{last - first} unchanged lines</summary>"
                rows[first:last] = [f"<details>{folded}{''.join(rows[first:last])}</details>"]
            parts += rows
        else:
            gone, come = ([n for n in lines if page.lines[n][0] == sign] for sign in "-+")
            pairs = beside(*([page.lines[n][1:] for n in some] for some in (gone, come)))
            rows = [
                row(
                    None if a is None else gone[a],
                    None if b is None else come[b],
                    True,
                )
                for a, b in pairs
            ]
            card = told.pop(name, "")  # beside the first of its lines
            text = f"<div>{''.join(rows)}</div>{card}"
            parts.append(f'<section class="change" tabindex="0">{text}</section>')
    head = f'<div class="row head"><b>{escape(old)}</b><b>{escape(new)}</b></div>'
    return f'<div class="pair highlight">{head}{"".join(parts)}</div>'
