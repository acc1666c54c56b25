"""The site: complete, without a warning or a dead link, readable on every screen, searchable."""

import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import support
from real import lacking
from support import ROOT, screen

from bench.ladder import PAIRS
from bench.process import environment, run
from docs.make.site import LOCK

pytestmark = pytest.mark.full

# A query, and the page that must be the first one found.
FIRST = {
    "resume": "docs/howto/resume",
    "out of memory": "docs/techniques/memory",
    "slurm": "docs/howto/slurm",
}
# A word, and a page that must be among those found.
FOUND = {
    "set_epoch": "docs/diffs/mnmc_ddp_launch",
    "fully_shard": "docs/diffs/fsdp",
    "PowerSGD": "docs/diffs/comm_hooks",
}


def installed() -> None:
    """Sphinx is there, or --install installs it; skips otherwise."""
    try:
        import furo  # noqa: F401
        import myst_parser  # noqa: F401
    except ImportError:
        if not support.INSTALL:
            lacking(f"no Sphinx: --install installs {LOCK}")
        uv = shutil.which("uv", path=Path(sys.executable).parent)
        command = [uv, "pip", "install", "--python", sys.executable] if uv else None
        command = command or [sys.executable, "-m", "pip", "install"]
        done = run([*command, "-r", str(ROOT / LOCK)], 300, environment())
        if done.code:
            lacking(f"{LOCK} could not be installed: {done.last_line}")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site; building it gives no warning. It needs only what is in LOCK."""
    installed()
    folder = tmp_path_factory.mktemp("site")
    for name in ("torch", "pandas", "matplotlib"):
        (folder / f"{name}.py").write_text("raise ImportError")
    out = folder / "out"
    command = [sys.executable, "-m", "docs.make", "site", "--out", str(out)]
    done = run(command, 240, environment(PYTHONPATH=str(folder)))
    assert (done.code, done.err) == (0, "")
    return out


class Html(HTMLParser):
    """A page's anchors, what it links to, and the text of each element of a class."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids, self.links, self.lines, self.cards = set(), [], {"old": [], "new": []}, []
        self.open = None
        self.feed(path.read_text())

    def handle_starttag(self, tag, pairs):
        found = dict(pairs)
        self.ids.add(found.get("id"))
        self.links += [(tag, found[key]) for key in ("href", "src") if key in found]
        if "data-line" in found:
            self.open = self.lines[found["class"]]
            self.open.append([int(found["data-line"]), ""])
        if found.get("class") == "card":
            self.cards.append("")

    def handle_endtag(self, tag):
        self.open = None if tag == "code" else self.open

    def handle_data(self, text):
        if self.open is not None:
            self.open[-1][1] += text
        elif self.cards:
            self.cards[-1] += text


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Html]:
    """All pages, parsed."""
    return {path: Html(path) for path in site.rglob("*.html")}


def test_every_page_of_the_project_is_there(site):
    names = ["index.html", "CONTRIBUTING.html", "techniques/README.html"]
    docs = ROOT.glob("docs/**/*.md")
    names += [path.relative_to(ROOT).with_suffix(".html").as_posix() for path in docs]
    assert len(names) > 40 and [name for name in names if not (site / name).is_file()] == []
    front = Html(site / "index.html")
    linked = {link for _, link in front.links}
    assert set(names[2:]) <= linked  # the navigation


def test_every_link_and_anchor_resolves(pages):
    """Within the site. What a page loads, as scripts and styles, is all within the site."""
    dead, count = [], 0
    for path, page in pages.items():
        for tag, link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                assert tag == "a", (path, link)
                continue
            count += 1
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            anchor = unquote(url.fragment)
            if not target.is_file() or (
                anchor and target in pages and anchor not in pages[target].ids
            ):
                dead.append((path.name, link))
    assert count > 1000 and dead == []


def test_styles_load_nothing_from_outside(site):
    text = "".join(path.read_text() for path in site.rglob("*.css"))
    assert text and not re.findall(r"url\(['\"]?(?:https?:)?//|@import", text)


def test_pairs_have_all_lines_in_order_and_the_cards(site, pages):
    for old, new in PAIRS:
        page = pages[site / "pairs" / f"{Path(new).stem}.html"]
        for side, script in (("old", old), ("new", new)):
            lines = (ROOT / script).read_text().splitlines()
            assert page.lines[side] == [[k, line] for k, line in enumerate(lines, 1)], new
        text = (ROOT / "docs" / "diffs" / f"{Path(new).stem}.md").read_text()
        told = re.findall(r"^<!-- piece (?:(?!-->).)*-->\n> \*\*", text, re.M | re.S)
        assert len(page.cards) == len(told), new
        assert all(re.search("SILENT|NaN|HANG|CRASH|NO EFFECT HERE", card) for card in page.cards)


def test_the_search_puts_the_wanted_page_first(browser, site):
    """From disk, by the script of the search page. Listings of sources are not found."""
    from selenium.webdriver.support.ui import WebDriverWait

    script = "return [...document.querySelectorAll('#search-results li a')].map(a => a.href)"
    for query, page in (FIRST | FOUND).items():
        browser.get(f"{(site / 'search.html').as_uri()}?q={query}")
        wanted = (site / f"{page}.html").as_uri()

        def known(_, wanted=wanted):
            return any(link.startswith(wanted) for link in browser.execute_script(script))

        WebDriverWait(browser, 60).until(known, f"{query}: {page}")
        links = browser.execute_script(script)
        assert query in FOUND or links[0].startswith(wanted), (query, links[:3])
        assert not [link for link in links if ".py." in link or "/pairs/" in link]


# What is wider than its own box, and neither scrolls nor wraps. (The link behind a heading, which
# shows when the mouse is there, may hang over.)
CUT = """return [...document.querySelectorAll('article *')].filter(e => e.clientWidth
  && e.scrollWidth > e.clientWidth + 1 && !e.matches('section, h1, h2, h3, h4')
  && !['inline'].includes(getComputedStyle(e).display)
  && !['auto', 'scroll'].includes(getComputedStyle(e).overflowX)).map(e => e.outerHTML)"""


def test_it_fits_phones_and_is_light_or_dark(browser, site, pages):
    """All pages but those of sources, which are all alike; of the pairs, the largest."""
    pairs = [path for path in pages if path.parent.name == "pairs"]
    alike = sorted(pairs, key=lambda path: path.stat().st_size)[:-1]
    screen(browser, 390, "light")
    for path in pages:
        if path.suffixes != [".html"] or path in alike:
            continue
        browser.get(path.as_uri())
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= 390 and browser.execute_script(CUT) == [], path
    for scheme in ("light", "dark"):
        screen(browser, 1400, scheme)
        body = browser.find_element("css selector", "body")
        color = body.value_of_css_property("background-color")
        channels = [int(x) for x in re.findall(r"\d+", color)[:3]]
        assert min(channels) > 200 if scheme == "light" else max(channels) < 60
    assert browser.get_log("browser") == []


def test_a_phone_has_buttons_for_the_old_and_the_new_script(browser, site):
    screen(browser, 390, "light")
    browser.get((site / "pairs" / "mnmc_ddp_launch.html").as_uri())
    lines = "return [...document.querySelectorAll('.pair > .row .{0}, .change .{0}')].filter(e => "
    lines += "e.checkVisibility()).length"
    seen = {}
    for view in ("old", "new", "both"):
        browser.find_element("css selector", f".pair [value={view}]").click()
        seen[view] = [browser.execute_script(lines.format(side)) for side in ("old", "new")]
    assert seen["old"][0] > 50 and seen["old"][1] == 0
    assert seen["new"][0] == 0 and seen["new"][1] > 100
    assert 0 < seen["both"][0] < seen["old"][0] and seen["both"][1] == seen["new"][1]
