"""report.html: it says what the files say, whatever the records hold, and fits every screen."""

import base64
import gzip
import json
import re
import shutil
from html import unescape
from pathlib import Path

import made_up
import pytest
from support import ROOT, full, screen

from bench import records
from bench.show import report, table
from bench.show.summary import Run

RATES = {"mnmc_ddp_launch.py x2": 800, "mnmc_ddp_mp.py x2": 800, "mnmc_horovod.py x2": 600}
RATES |= {"mnmc_ddp_slurm.py x2": 800}
OLD = sorted((ROOT / "logs").glob("*/*/records.jsonl"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of known speeds, with its table and page."""
    place = tmp_path_factory.mktemp("report") / "result"
    made_up.run(place, RATES, 12)
    for part in (table, report):
        part.write(Run.of(place))
    return place


def written(folder: Path) -> str:
    """The page of a folder's records."""
    report.write(Run.of(folder))
    return (folder / report.NAME).read_text()


def parts(text: str, tag: str) -> list[str]:
    """What the elements of a kind hold, without markup."""
    found = re.findall(rf"<{tag}[ >].*?</{tag}>", text, re.S)
    return [unescape(" ".join(re.sub("<[^>]+>", " ", part).split())) for part in found]


def test_the_words_on_the_page_are_those_of_table_md(folder):
    """Cell by cell, fastest first; the result in words, the notes, and the records themselves."""
    lines = (folder / "table.md").read_text().splitlines()
    cells = [line[2:-2].split(" | ") for line in lines if line.startswith("| ")]
    text = (folder / report.NAME).read_text()
    first = text.split("</table>")[0]
    shown = [parts(row, "t[hd]") for row in re.findall("<tr>.*?</tr>", first, re.S)]
    shown = [[re.sub(r"<.*?>", "", cell) for cell in row] for row in shown]
    explained = {column.name: column.explained for column in table.FEW}
    assert shown[0] == [f"{name} {explained[name]}" for name in cells[0]]
    place = cells[0].index("images/s")
    rates = [float(row[place].replace(",", "")) for row in cells[2:]]
    assert [row[place] for row in shown[1:]] == [f"{x:,.0f}" for x in sorted(rates, reverse=True)]
    assert sorted(shown[1:]) == sorted(cells[2:]) and len(rates) >= 4
    assert parts(text, "li") == [line[2:] for line in lines if line.startswith("- ")]
    assert parts(text, "h1") == [lines[0].strip("*")] and lines[2] in parts(text, "p")
    packed = re.search(r"application/gzip;base64,(.*?)\"", text)[1]
    assert gzip.decompress(base64.b64decode(packed)) == (folder / records.NAME).read_bytes()


def test_what_records_say_is_text_never_markup(tmp_path):
    """Records may come from another's machine."""
    evil = "</script><script>alert(1)</script>"
    text = next(text for path in OLD if '"kind": "skip"' in (text := path.read_text()))
    lines = [json.loads(line) for line in text.splitlines()]
    lines[0]["environment"] |= {"cpu": evil, "topology": f"{evil}\nGPU0"}
    next(line for line in lines if line["kind"] == "skip")["reason"] = evil
    (tmp_path / records.NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = written(tmp_path)
    assert "alert(1)" in text and "<script" not in text


@pytest.mark.parametrize("path", [OLD[0], *full(OLD[-1])], ids=lambda path: path.parent.name)
def test_old_records_still_give_a_page(path, tmp_path):
    """Those in logs/, whatever version of the harness wrote them."""
    shutil.copy(path, tmp_path)
    text = written(tmp_path)
    assert '<figure id="plot-throughput">' in text and 'class="lead"' in text


@pytest.mark.full
def test_it_fits_every_screen_light_and_dark(browser, folder):
    """Only a table scrolls, within itself; the browser finds nothing to complain about."""
    colours = []
    for scheme, width in (("light", 390), ("dark", 838), ("dark", 1400)):
        screen(browser, width, scheme)
        browser.get((folder / report.NAME).as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        body = browser.find_element("css selector", "body")
        colours.append(body.value_of_css_property("background-color"))
    light, dark, _ = ([int(x) for x in re.findall(r"\d+", text)[:3]] for text in colours)
    assert min(light) > 200 and max(dark) < 60
    assert browser.get_log("browser") == []
