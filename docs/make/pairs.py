"""Two scripts side by side, with what happened without each change: a page of the site, as HTML."""

import re
from difflib import SequenceMatcher
from html import escape
from itertools import groupby

from bench import ROOT
from mistakes.page import BLOCK, Page

CONTEXT = 3  # unchanged lines shown around a change
MAIN = ' id="main"'  # where the page opens
VIEW = '<label><input type="radio" name="view" value="{}"> {}</label>'  # for narrow screens
LIKE = 0.5  # a removed and an added line this similar stand beside each other


def beside(lines: list[str], old: list[int], new: list[int]) -> list[tuple[int | None, int | None]]:
    """Rows of a change: each removed line beside the next added one that is like it.

    old, new: the numbers of these lines in the diff.
    """
    rows = []
    for number in old:
        text = lines[number][1:].strip()
        ratios = [SequenceMatcher(None, text, lines[n][1:].strip()).ratio() for n in new]
        if ratios and max(ratios) > LIKE:
            found = ratios.index(max(ratios))
            rows += [(None, n) for n in new[:found]] + [(number, new[found])]
            new = new[found + 1 :]
        else:
            rows.append((number, None))
    return rows + [(None, n) for n in new]


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


def cell(side: str, number: int, script: list[list[tuple[str, str]]], marks: set[int]) -> str:
    """A line of a script with these columns marked; number: from 0."""
    parts, column = [], 0
    for kind, value in script[number]:
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


def folded(rows: list[str]) -> list[str]:
    """Unchanged rows behind a line that opens them; one row stays as it is."""
    summary = f"<summary>{len(rows)} unchanged lines</summary>"
    return [f"<details>{summary}{''.join(rows)}</details>"] if len(rows) > 1 else rows


def side_by_side(page: Page, old: str, new: str) -> str:
    """The body of a pair's page."""
    scripts = [tokens((ROOT / name).read_text()) for name in (old, new)]
    places, at = [], (0, 0)  # of a line of the diff: its number in each script
    for line in page.lines:
        places.append(at)
        at = at[0] + (line[0] != "+"), at[1] + (line[0] != "-")

    def row(*numbers: int | None) -> str:
        """Two lines, by their numbers in the diff; an unchanged one has the same number twice."""
        marks = set(), set()
        if None not in numbers and len({*numbers}) == 2:
            marks = changed_words(*(page.lines[n][1:] for n in numbers))
        cells = "".join(
            "<i></i>" if n is None else cell(side, places[n][k], scripts[k], marks[k])
            for k, (side, n) in enumerate(zip(("old", "new"), numbers, strict=True))
        )
        begins = numbers[1] is not None and page.lines[numbers[1]][1:].startswith("def main(")
        return f'<div class="row"{MAIN * begins}>{cells}</div>'

    told, parts, every = cards(page), [], runs(page)
    for k, (name, lines) in enumerate(every):
        if name is None:
            rows = [row(n, n) for n in lines]
            first = CONTEXT if k else 0
            last = len(rows) - (CONTEXT if k < len(every) - 1 else 0)
            main = next((k for k in range(first, last) if MAIN in rows[k]), last)
            tail = rows[main : main + 1] + folded(rows[main + 1 : last]) if main < last else []
            rows[first:last] = folded(rows[first:main]) + tail
            parts += rows
        else:
            gone, come = ([n for n in lines if page.lines[n][0] == sign] for sign in "-+")
            rows = "".join(row(*pair) for pair in beside(page.lines, gone, come))
            card = told.pop(name, "")  # beside the first of its lines
            parts.append(f'<section class="change" tabindex="0"><div>{rows}</div>{card}</section>')
    views = "".join(VIEW.format(*view) for view in (("old", old), ("new", new), ("both", "both")))
    views = views.replace('value="both"', 'value="both" checked')
    head = f'<div class="row head">{views}</div>'
    return f'<div class="pair highlight">{head}{"".join(parts)}</div>'
