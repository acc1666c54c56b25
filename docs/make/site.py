"""python -m docs.make site: the project's pages as a site that needs no network and has search.

It starts from README.md, the other pages in FIRST and docs/, and follows their links: a Markdown
file becomes a page, a file of data or a picture is copied, any other text file becomes a page that
shows it. Each page of docs/diffs/ gets a page with its two scripts side by side. The navigation has
the sections and the links of docs/README.md, in their order. The search leaves out what has the
front matter HIDDEN; static/scorer.js says which pages come first. Sphinx builds it.
"""

import argparse
import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from bench import ROOT, UserError, refuse
from bench.ladder import PAIRS
from docs.make.pairs import side_by_side
from mistakes.page import parse

NAME = "rungs"
FIRST = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "techniques/README.md"]
INDEX = "docs/README.md"
WORDS = {  # of those who search; the pages say them in another way
    "docs/learn/map.md": "7B, 13B, 70B, LLM",
    "docs/techniques/memory.md": "out, memory, OOM",
}
HIDDEN = "---\nnosearch: true\n---\n"
COPIED = {".csv", ".jsonl", ".png", ".svg", ".ipynb"}
ENTRY = re.compile(r"\[([^]]+)\]\(([^)#]+\.md)[^)]*\)")  # a link to a page
INTERVAL = re.compile(r"(?<=[\d%]) ([\[(]-?[\d.%]+(?:,| to)) (-?[\d.%]+[])])")  # behind its mean
LINK = re.compile(r'(?<=\]\()[^)\s:#]+(?=[)#])|(?<=<img src=")[^":]+')  # to a file of the project
FENCE = re.compile(r"(^```.*?^```$)", re.S | re.M)
BESIDE = {f"docs/diffs/{Path(new).stem}.md": (old, new) for old, new in PAIRS}
LOCK = "requirements/site.lock"
SETTINGS = {
    "project": NAME,
    "html_title": NAME,
    "root_doc": "index",
    "extensions": ["myst_parser"],
    "myst_heading_anchors": 6,
    "myst_enable_extensions": ["html_image"],
    "html_theme": "furo",
    "html_static_path": [str(Path(__file__).parent / "static")],
    "html_css_files": ["site.css"],
    "html_js_files": ["site.js"],
    "html_search_scorer": str(Path(__file__).parent / "static" / "scorer.js"),
    "html_copy_source": False,
    "html_show_search_summary": False,  # the browser would fetch pages, which file:// forbids
    "html_show_copyright": False,
    "suppress_warnings": ["toc.not_included"],  # pages of sources are reached by links
}


def toctree(caption: str, entries: dict[str, str]) -> str:
    """A section of the navigation. entries: the title of each page, by its path."""
    pages = [f"{title} <{staged(page).removesuffix('.md')}>" for page, title in entries.items()]
    options = f":hidden:\n:caption: {caption}"
    return "\n".join(["", "```{toctree}", options, "", *pages, "```", ""])


def sections() -> dict[str, dict[str, str]]:
    """The sections of the navigation: of the index, then the diffs and the project's own pages."""
    found, seen = {}, set()
    for part in (ROOT / INDEX).read_text().split("\n## ")[1:]:
        caption, _, text = part.partition("\n")
        entries = {}
        for words, link in ENTRY.findall(text):
            page = os.path.normpath(os.path.join(os.path.dirname(INDEX), link))
            if page not in seen and not page.startswith("docs/diffs/"):
                seen.add(page)
                words = " ".join(words.split())
                entries[page] = words if ".py" in words else words[0].upper() + words[1:]
        found |= {caption: entries} if entries else {}
    others = (path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/diffs/*.md")))
    found["Diffs of the scripts"] = {page: Path(page).stem for page in [*BESIDE, *others]}
    return found | {"Project": {"CONTRIBUTING.md": "Contributing", "CHANGELOG.md": "Changes"}}


class Stage:
    """The folder that Sphinx reads: pages as in the project, their links adapted."""

    def __init__(self, folder: Path):
        self.folder = folder
        pages = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")]
        self.waiting = [*FIRST, *pages]
        self.seen = set(self.waiting)

    def write(self, name: str, text: str) -> None:
        """A file of this folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def target(self, page: str, link: str) -> str:
        """A link of a page as Sphinx understands it; what it leads to is staged later."""
        path = os.path.normpath(os.path.join(os.path.dirname(page), link))
        if (ROOT / path / "README.md").is_file():
            path = os.path.join(path, "README.md")
        if not (ROOT / path).exists():
            return link  # Sphinx warns
        if path not in self.seen:
            self.seen.add(path)
            self.waiting.append(path)
        return os.path.relpath(staged(path), os.path.dirname(page) or ".")

    def page(self, name: str) -> None:
        """A Markdown file."""
        parts = FENCE.split((ROOT / name).read_text())
        parts[::2] = [LINK.sub(lambda m: self.target(name, m[0]), part) for part in parts[::2]]
        text = INTERVAL.sub("\u00a0\\1\u00a0\\2", "".join(parts))
        if name == "README.md":
            text += "".join(toctree(*section) for section in sections().items())
        if name in BESIDE:
            text = self.pair(name, text)
        if name in WORDS:
            text = f'---\nmyst:\n  html_meta:\n    keywords: "{WORDS[name]}"\n---\n{text}'
        self.write(staged(name), (HIDDEN if name.startswith("logs/") else "") + text)

    def pair(self, name: str, text: str) -> str:
        """The page of a pair of scripts side by side; returns the text that links to it."""
        page = parse(ROOT / name)
        old, new = BESIDE[name]
        self.write(f"pairs/{page.name}.html", side_by_side(page, old, new))
        head = f"---\nhide-toc: true\nnosearch: true\n---\n\n# {old} → {new}\n\n"
        head += f"[What each change does](../{name}), measured without it. "
        head += "Press **n** for the next change, **p** for the one before.\n\n"
        html = f"```{{raw}} html\n:file: {page.name}.html\n```\n"
        self.write(f"pairs/{page.name}.md", head + html)
        link = f'<a href="../../pairs/{page.name}.html#main">The two scripts side by side</a>'
        text = re.sub(r"(<!-- diff .*?-->\n)", rf"\1\n{link}\n", text, count=1, flags=re.S)
        return re.sub(r"(?=^<!-- piece (.*?):)", r'<a id="piece-\1"></a>\n\n', text, flags=re.M)

    def listing(self, name: str) -> None:
        """A folder, as a page of links to its files."""
        kept = {".md", *COPIED} if name.startswith("logs/") else {".md"}
        paths = [path for path in sorted((ROOT / name).rglob("*")) if path.suffix in kept]
        lines = [path.relative_to(ROOT / name).as_posix() for path in paths]
        index = f"{name}/index.md"
        text = "\n".join(
            f"- [{p}]({self.target(index, p)})" for p in lines if not p.startswith("runs/")
        )
        self.write(index, f"{HIDDEN}# {name}/\n\n{text}\n")

    def source(self, name: str) -> None:
        """Any other text file, highlighted."""
        from pygments.lexers import find_lexer_class_for_filename as find

        known = find(name)
        language = known.aliases[0] if known else "text"
        text = f"# {name}\n\n``````{language}\n{(ROOT / name).read_text().rstrip()}\n``````\n"
        self.write(staged(name), HIDDEN + text)

    def fill(self) -> None:
        """All pages, and all that they link to."""
        while self.waiting:
            name = self.waiting.pop()
            path = ROOT / name
            if path.is_dir():
                self.listing(name)
            elif path.suffix == ".md":
                self.page(name)
            elif path.suffix in COPIED:
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, self.folder / name)
            else:
                self.source(name)


def staged(path: str) -> str:
    """The name of a project's file in the folder that Sphinx reads."""
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    if path == "README.md":
        return "index.md"
    return path if Path(path).suffix in {".md", *COPIED} else f"{path}.md"


def build(out: Path) -> str:
    """Builds the site; returns Sphinx's warnings. Raises UserError if it is not installed."""
    try:
        import furo  # noqa: F401
        import myst_parser  # noqa: F401
        from sphinx.application import Sphinx
    except ImportError as error:
        raise UserError(f"site needs {error.name}: uv pip install -r {LOCK}") from None
    with tempfile.TemporaryDirectory() as place:
        pages, made, doctrees = (Path(place) / name for name in ("pages", "made", "doctrees"))
        Stage(pages).fill()
        warnings = io.StringIO()
        app = Sphinx(pages, None, made, doctrees, "html", SETTINGS, status=None, warning=warnings)
        app.connect("html-page-context", show_files)
        app.build()
        shutil.rmtree(made / ".doctrees", ignore_errors=True)
        replace(made, out)
    return warnings.getvalue()


def show_files(app, pagename, templatename, context, doctree) -> None:
    """A click on a plot or a table shows it: Sphinx would have the browser save it."""
    if "body" in context:
        context["body"] = context["body"].replace(' download=""', "")


def replace(made: Path, out: Path) -> None:
    """Puts the site in its place at once. Raises UserError if something else is there."""
    if out.exists() and any(out.iterdir()) and not (out / "searchindex.js").exists():
        raise UserError(f"--out {out}: has files that are no site: give another folder")
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(made, part)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def main(argv: list[str]) -> int:
    """Builds the site; exit code 1 with a warning, 2 if something must be installed."""
    parser = argparse.ArgumentParser(prog="docs.make site", description=__doc__)
    parser.error = refuse
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "site", help="[.cache/site]")
    args = parser.parse_args(argv)
    if warnings := build(args.out.resolve()):
        print(warnings, file=sys.stderr, end="")
        return 1
    print(f"{args.out / 'index.html'}")
    return 0
