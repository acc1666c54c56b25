"""Writes the generated parts of README.md and of pages in docs/ and techniques/, and pictures.

    python -m docs.make           writes them
    python -m docs.make --check   exit code 1 where a file differs from what it would write
    python -m docs.make site      builds the site: see site.py

A part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. PARTS of the modules below say
what makes each.
"""

import re
import sys
from collections.abc import Callable

from bench import ROOT, UserError
from bench.records import write_whole
from docs.make import site  # which is built without pandas and matplotlib


def parts() -> dict[str, dict[str, list[Callable[[], str]]]]:
    """What makes each part, by page and name."""
    from docs.make import audited, launchers, nodes, readme, tables

    found: dict[str, dict[str, list]] = {}
    for module in (readme, tables, audited, launchers, nodes):
        for part in module.PARTS:
            found.setdefault(part.page, {}).setdefault(part.name, []).append(part.text)
    return found


def render(page: str, text: str) -> str:
    """The text of a page with every generated part made anew.

    Raises ValueError where one is missing.
    """
    for part, makers in parts()[page].items():
        pattern = re.compile(f"(<!-- begin {part} -->\n).*?(<!-- end {part} -->)", re.S)
        body = "\n\n".join(filter(None, (make() for make in makers)))
        text, found = pattern.subn(lambda m, body=body: f"{m[1]}\n{body}\n\n{m[2]}", text)
        if found != 1:
            raise ValueError(f"{page} has {found} parts named {part}, it must have one")
    return text


def main(argv: list[str]) -> int:
    """Writes or checks the files, or builds the site; returns the exit code."""
    if argv[:1] == ["site"]:
        try:
            return site.main(argv[1:])
        except UserError as error:
            print(f"docs.make: {error}", file=sys.stderr)
            return 2
    if argv not in ([], ["--check"]):
        print(f"docs.make: {argv[0]}: there are only --check and site", file=sys.stderr)
        return 2
    from docs.make import pictures

    stale = pictures.stale()
    for page in parts():
        old = (ROOT / page).read_text()
        if (new := render(page, old)) != old:
            stale[ROOT / page] = new
    for path, new in stale.items():
        if argv:
            name = path.relative_to(ROOT)
            print(f"{name} is not up to date: python -m docs.make", file=sys.stderr)
        else:
            write_whole(path, new)
    return int(bool(argv and stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
