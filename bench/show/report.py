"""report.html: a result's table, plots, diffs, environment and records on one page.

Everything stands in the page itself, so it can be mailed, archived and opened without a network;
the page's own policy forbids the browser to load anything else.
"""

import base64
import difflib
import gzip
import json
import re
from html import escape
from pathlib import Path

from bench import ROOT, records
from bench.cases import PLAIN
from bench.ladder import PAIRS
from bench.show import plot, table, words
from bench.show.summary import by_case, title, usable

NAME = "report.html"
HERE = Path(__file__).resolve().parent
CARRIED = 1_500_000  # characters of base64; a file that needs more is not put into the page
STYLES = {"light": "xcode", "dark": "native"}  # those whose colours are dark and light enough
# Blanks, names and punctuation have no colour in either style; without theirs the page is smaller.
UNCOLOURED = re.compile(r'<span class="[wnp]">([^<]*)</span>')


def scripts() -> list[str]:
    """The ladder's scripts and the techniques, in the order of the pairs."""
    return [*dict.fromkeys(name for old, new in PAIRS for name in (old, new))]


def changes(old: list[str], new: list[str]) -> list[list[int]]:
    """The blocks that differ, as [i1, i2, j1, j2]: lines i1 to i2 of old became j1 to j2 of new."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)  # as diff -u counts
    return [block for tag, *block in matcher.get_opcodes() if tag != "equal"]


def link(old: str, new: str) -> str:
    """The address of a diff on the page."""
    return f"#diff={old}..{new}"


def gallery() -> tuple[dict[str, list[str]], dict[str, dict[str, list]]]:
    """Each script's lines as highlighted HTML, and the changes by old and new script.

    Every ordered pair is compared: difflib may match a pair differently the other way round.
    """
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    lexer, formatter = PythonLexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True)
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in scripts()}
    lines = {name: text.splitlines() for name, text in texts.items()}
    shown = {
        name: UNCOLOURED.sub(r"\1", highlight(text, lexer, formatter))
        .removesuffix("\n")
        .split("\n")
        for name, text in texts.items()
    }
    assert all(len(shown[name]) == len(lines[name]) for name in texts)
    found = {old: {new: changes(lines[old], lines[new]) for new in texts} for old in texts}
    return shown, found


def style() -> str:
    """The colours of the code, light and dark."""
    from pygments.formatters import HtmlFormatter

    parts = []
    for scheme, name in STYLES.items():
        rules = "\n".join(HtmlFormatter(style=name).get_token_style_defs("#code"))
        parts.append(f"@media (prefers-color-scheme: {scheme}) {{\n{rules}\n}}")
    return "\n".join(parts)


def speeds(rows: list[dict]) -> str:
    """The table, fastest first; a case's name links to the diff of its script.

    The columns that are not in table.md are of the class `more`, which the page hides.
    """
    timed = words.timed(rows)
    timed.sort(key=lambda row: -row["images_per_second"])
    texts = table.cells(timed, [*table.FEW, *table.MORE])
    columns = [column for column in (*table.FEW, *table.MORE) if column.name in texts]
    numbers = {name: any(re.match(r"\d", text) for text in texts[name]) for name in texts}
    numbers["case"] = False  # a name, whatever it begins with
    head = "".join(heading(column, numbers[column.name]) for column in columns)
    body = []
    for k, row in enumerate(timed):
        place = f'<tr data-place="{rows.index(row)}"><th scope="row">{case(row)}</th>'
        parts = [
            cell(column, texts[column.name][k], numbers[column.name]) for column in columns[1:]
        ]
        body.append(f"{place}{''.join(parts)}</tr>")
    for place, row in enumerate(rows):
        if row["status"] != "ok":
            why = f'<td class="without" colspan="{len(columns) - 1}">{escape(row["status"])}</td>'
            body.append(f'<tr data-place="{place}"><th scope="row">{case(row)}</th>{why}</tr>')
    lines = "\n".join(body)
    return f"<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody>"


def kinds(column: table.Column, number: bool) -> str:
    """The class attribute of a column's cells."""
    names = ["number"] * number + ["more"] * (column in table.MORE)
    return f' class="{" ".join(names)}"' if names else ""


def heading(column: table.Column, number: bool) -> str:
    """The head of a column: a button that sorts, and what the column shows."""
    order = "descending" if column.name == "images/s" else "none"
    return (
        f'<th scope="col" aria-sort="{order}"{kinds(column, number)}>'
        f'<button type="button">{escape(column.name)}</button>'
        f"<small>{escape(column.explained)}</small></th>"
    )


def case(row: dict) -> str:
    """A case's name; it links to the diff that its script costs."""
    before = {new: old for old, new in PAIRS}
    name = escape(row["case"]).replace("_", "_<wbr>")  # a phone may break it there
    if row["script"] not in set(scripts()) - {PLAIN}:
        return name
    address = link(before.get(row["script"], PLAIN), row["script"])
    return f'<a href="{escape(address)}">{name}</a>'


def cell(column: table.Column, text: str, number: bool) -> str:
    """A cell; a claim in it gets its colour."""
    text, name = escape(text), escape(column.name)
    if column.name.startswith("against") and text.endswith("]"):
        text += '<span class="claim"></span>'  # keeps the numbers of a column in one line
    for claim in (*words.CLAIMS, "the control", "baseline"):
        if text == claim or text.endswith(f" {claim}"):
            mark = claim.replace(" ", "-")
            text = f'{text.removesuffix(claim)}<span class="claim {mark}">{claim}</span>'
    return f'<td data-head="{name}"{kinds(column, number)}>{text}</td>'


def plots(elements: list[tuple[str, str, str, str]]) -> str:
    """Every picture within the page, with its question and answer; a button that opens it large."""
    parts = []
    for name, svg, question, answer in elements:
        button = f'<button type="button" aria-label="Enlarge: {escape(question)}">{svg}</button>'
        caption = f"<figcaption><strong>{escape(question)}</strong> {escape(answer)}</figcaption>"
        parts.append(f'<figure id="plot-{name}">{button}{caption}</figure>')
    return "\n".join(parts)


def origin(known: list[dict]) -> str:
    """When the run began, how long it took, and its command."""
    word = "by" if known[0].get("command") else "again with"
    parts = [words.when(known), f"{word} <code>{escape(words.command(known))}</code>"]
    return f"Measured {', '.join(filter(None, parts))}"


def described(value) -> str:
    """Any JSON value as HTML: dicts as definition lists, texts of several lines as they stand."""
    if isinstance(value, dict) and value:
        rows = (
            f"<dt>{escape(str(key))}</dt><dd>{described(part)}</dd>" for key, part in value.items()
        )
        return f"<dl>{''.join(rows)}</dl>"
    if isinstance(value, list) and value:
        if any(isinstance(part, dict | list) for part in value):
            return f"<ol>{''.join(f'<li>{described(part)}</li>' for part in value)}</ol>"
        return ", ".join(described(part) for part in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value in (None, "", [], {}):
        return '<span class="none">none</span>'
    text = escape(str(value))
    return f'<pre tabindex="0">{text}</pre>' if "\n" in text else text


def download(path: Path) -> str:
    """A button that gives the file back byte for byte, or words where it is too large for that."""
    name, raw = escape(path.name), path.read_bytes()
    size = f"{len(raw) / 1000:,.0f} kB"
    packed = base64.b64encode(gzip.compress(raw, compresslevel=6, mtime=0)).decode()
    if len(packed) > CARRIED:
        return (
            f"<li><code>{name}</code> ({size}) is too large to be carried in this page: it lies "
            f"in the folder <code>{escape(path.resolve().parent.name)}</code>, beside it.</li>"
        )
    return (
        f'<li><button type="button" data-file="{name}">{name}</button> {size}'
        f'<script type="text/plain">{packed}</script></li>'
    )


def ladder(found: dict[str, dict[str, list]]) -> str:
    """A link to each diff of the ladder, with its size."""
    parts = []
    for old, new in PAIRS:
        added = sum(j2 - j1 for _, _, j1, j2 in found[old][new])
        removed = sum(i2 - i1 for i1, i2, _, _ in found[old][new])
        words = f"{escape(old)} \u2192 {escape(new)}"
        size = f"<small>+{added} \u2212{removed}</small>"
        parts.append(f'<li><a href="{escape(link(old, new))}">{words} {size}</a></li>')
    return "\n".join(parts)


def options(names: list[str], chosen: str) -> str:
    """The choices of a <select>."""
    return "".join(
        f"<option{' selected' if name == chosen else ''}>{escape(name)}</option>" for name in names
    )


def write(folder: Path, read: tuple | None = None) -> Path:
    """Makes report.html of a folder's records and of its table.csv; returns its path.

    read: what records.measured gives, where it is there already. Raises records.BadRecords.
    """
    known, warning = read or records.measured(folder)
    kept = usable(known)
    rows = by_case(kept)
    remarks = table.notes(known, kept, rows, warning)[len(words.without(rows)) :]  # have rows
    pictures, (files, found) = plot.elements(plot.Run(kept, rows, folder), gallery)
    old, new = PAIRS[0]
    code = json.dumps({"files": files, "changes": found}, separators=(",", ":"))
    raw = [path for name in (records.NAME, "table.csv") if (path := folder / name).is_file()]
    parts = {
        "heading": escape(title(known)),
        "sentence": escape(words.sentence(rows)),
        "origin": origin(known),
        "table": speeds(rows),
        "remarks": "\n".join(f"<li>{escape(line)}</li>" for line in remarks),
        "plots": plots(pictures),
        "ladder": ladder(found),
        "old": options([*files], old),
        "new": options([*files], new),
        "environment": described(known[0]["environment"]),
        "plan": described(known[0]["plan"]),
        "records": "\n".join(download(path) for path in raw),
        "code": code.replace("</", "<\\/"),  # nothing in it may end the element that holds it
        "css": (HERE / "report.css").read_text(encoding="ascii") + style(),
        "js": (HERE / "report.js").read_text(encoding="ascii"),
    }
    template = (HERE / NAME).read_text(encoding="ascii")
    page = re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], template)
    # ASCII, so that the page reads the same whatever the locale that writes or serves it.
    table.replace(folder / NAME, page.encode("ascii", "xmlcharrefreplace").decode())
    return folder / NAME
