"""report.html in a real browser, without a network: it sorts, links, says what the files say."""

import base64
import gzip
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import made_up
import pytest
from real import lacking
from support import ROOT, TECHNIQUES

from bench import records
from bench.diffs import counts, diff
from bench.ladder import PAIRS
from bench.show import report, table

RATES = {"mnmc_ddp_launch.py x2": 800, "mnmc_ddp_mp.py x2": 800, "mnmc_horovod.py x2": 600}
RATES |= {"mnmc_ddp_slurm.py x2": 800}
PAIR = ("snsc.py", "mnmc_ddp_launch.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of known speeds, beside transcripts of whole trainings, with its table and page."""
    place = tmp_path_factory.mktemp("report") / "result"
    made_up.run(place, RATES, 12)
    for path in (ROOT / "logs").glob("*/*.jsonl"):
        shutil.copy(path, place.parent)
    table.write(place)
    report.write(place)
    return place


@pytest.fixture(scope="module")
def browser(folder):
    """Headless Chromium that finds no host; Debian's packages, installed where that is possible."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        if os.geteuid() or not shutil.which("apt-get"):
            lacking("chromium and chromedriver are not installed")
        install = [
            "apt-get",
            "-oDPkg::Lock::Timeout=120",
            "install",
            "-qq",
            "--no-install-recommends",
        ]
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True, timeout=300)
        done = subprocess.run(
            [*install, "chromium", "chromium-driver"], capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            lacking(f"chromium could not be installed: {done.stderr.strip().splitlines()[-1:]}")
    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{flag}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option(
        "prefs", {"download.default_directory": str(folder / "downloads")}
    )
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, folder):
    """The page, opened afresh at 1280 pixels; page(hash) opens it at an address within it."""

    def open_at(where: str = "", width: int = 1280):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get("about:blank")
        browser.get((folder / report.NAME).as_uri() + where)
        return browser

    yield open_at
    assert browser.get_log("browser") == []  # neither errors nor warnings


def rows(driver) -> list[list[str]]:
    """The words of the table's body, as they stand on the page; without the hidden columns."""
    script = "return [...document.querySelectorAll('#speeds tbody tr')].map(r => [...r.cells]"
    script += ".filter(c => c.checkVisibility()).map(c => c.textContent))"
    return driver.execute_script(script)


def heads(driver) -> list:
    """The buttons that sort, without those of hidden columns."""
    found = driver.find_elements("css selector", "#speeds thead button")
    return [button for button in found if button.is_displayed()]


def test_the_words_on_the_page_are_those_of_table_md(page, folder):
    """Cell by cell, in another order; the result in words, and the notes."""
    lines = (folder / "table.md").read_text().splitlines()
    cells = [line[2:-2].split(" | ") for line in lines if line.startswith("| ")]
    driver = page()
    shown = rows(driver)
    assert [head.text.strip() for head in heads(driver)] == cells[0]
    assert sorted(row for row in shown if len(row) > 2) == sorted(cells[2:])
    notes = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    without = [": ".join(row) for row in shown if len(row) == 2]
    listed = [x.text for x in driver.find_elements("css selector", ".remarks li")]
    assert without + listed == notes and len(without) == 2
    assert driver.find_element("css selector", "h1").text == lines[0].strip("*")
    assert driver.find_element("css selector", ".lead").text == lines[2]


def test_the_sentence_on_top_says_what_was_put_in(folder):
    """What is slower, and by how much; what is not claimed; the control."""
    text = (folder / "table.md").read_text().splitlines()[2]
    first, second, control = re.findall(r".*?\D\.(?= |$)", text)
    (worst,) = re.findall(r"^Slower than snsc.py: mnmc_horovod.py x2 by (\d+)%", first)
    assert 35 <= int(worst) <= 45 and "4 more" not in first
    assert all(name in first for name in RATES) and "no clear difference: 6 cases" in first
    assert second.strip().startswith("Slower than mnmc_ddp_launch.py with as many processes")
    assert "mnmc_horovod.py x2" in second and "faster: snmc_dp.py x2" in second
    assert "includes 1, as it should" in control


def test_date_duration_and_command_stand_on_top(page, tmp_path):
    """The recorded command; else one of the same plan."""
    text = page().find_element("css selector", "header").text
    assert "2023-11-14 22:13 UTC, 11 minutes" in text and "python -m bench run --dataset" in text
    made_up.run(tmp_path, RATES, 2, command="python -m bench run --only mp")
    assert "<code>python -m bench run --only mp</code>" in report.write(tmp_path).read_text()


def test_the_table_comes_fastest_first_and_sorts_by_mouse_and_keyboard(page):
    """Rows without a number stay last; the third press brings the ladder's order."""
    from selenium.webdriver.common.keys import Keys

    driver = page()
    (place,) = [k for k, head in enumerate(heads(driver)) if head.text.startswith("images/s")]

    def numbers() -> list:
        found = [re.fullmatch(r"[\d,]+", "".join(row[place : place + 1])) for row in rows(driver)]
        return [float(match[0].replace(",", "")) if match else None for match in found]

    down = numbers()
    known = [x for x in down if x is not None]
    assert known == sorted(known, reverse=True) and len(known) >= 4
    assert down == known + [None] * 2
    heads(driver)[place].click()
    assert numbers() == sorted(known) + [None] * 2
    order = [head.get_attribute("aria-sort") for head in driver.find_elements("css selector", "th")]
    assert order.count("ascending") == 1 and order.count("descending") == 0
    heads(driver)[place].send_keys(Keys.ENTER)
    names = [row[0] for row in rows(driver)]
    assert names == [case["name"] for case in made_up.cases([1, 2])]


def test_the_other_columns_are_behind_a_switch(page):
    """Six to begin with; then those of table.MORE that have numbers, too."""
    driver = page()
    few = [head.text.strip() for head in heads(driver)]
    own = ("devices", "efficiency")  # the processes of this run share all cores
    assert few == [column.name for column in table.FEW if column.name not in own]
    driver.find_element("id", "more").send_keys(" ")
    more = [head.text.strip() for head in heads(driver)]
    assert more[: len(few)] == few and {"blocks", "between starts", "local batch"} < {*more}


@pytest.mark.parametrize("width", [400, 1000, 1600])
def test_no_column_is_cut(width, page):
    """The table fits into its place, and each of its cells into its own."""
    driver = page("", width)
    script = (
        "const box = document.querySelector('#speeds .scroll'), end = box.getBoundingClientRect();"
        "return [box.scrollWidth - box.clientWidth, [...box.querySelectorAll('th, td')].filter("
        "c => c.checkVisibility() && (c.scrollWidth > c.clientWidth + 1"
        " || c.getBoundingClientRect().right > end.right + 1)).map(c => c.textContent)]"
    )
    assert driver.execute_script(script) == [0, []]


def test_the_table_stays_on_paper_and_without_its_script(page, browser):
    """Fastest first, as the file itself says it."""
    driver = page()
    whole = rows(driver)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert rows(driver) == whole
    assert not driver.find_element("id", "more").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page()
        names = [x.text for x in driver.find_elements("css selector", "#speeds tbody th")]
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert names == [row[0] for row in whole]


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_link_opens_the_right_diff(old, new, page):
    """With the counts of `diff -u --minimal`, and both sides chosen. (Without that, diff may take a
    few lines more than it needs, of uneven_inputs.py four.)
    """
    driver = page(f"#diff={old}..{new}")
    assert driver.find_element("id", "old").get_property("value") == old
    assert driver.find_element("id", "new").get_property("value") == new
    added, removed = counts(diff(old, new, minimal=True))
    assert driver.find_element("id", "counts").text == f"+{added} \u2212{removed}"
    for tag, count in (("ins", added), ("del", removed)):
        assert len(driver.find_elements("css selector", f"#code > {tag}")) == count


def test_a_row_leads_to_the_diff_that_it_costs(page):
    """And choosing another pair by hand changes the address."""
    driver = page()
    link = driver.find_element("partial link text", "mnmc_ddp_mp.py x2")
    link.click()
    assert driver.current_url.endswith("#diff=mnmc_ddp_launch.py..mnmc_ddp_mp.py")
    driver.find_element("id", "swap").click()
    assert driver.current_url.endswith("#diff=mnmc_ddp_mp.py..mnmc_ddp_launch.py")
    added, removed = counts(diff("mnmc_ddp_mp.py", "mnmc_ddp_launch.py"))
    assert driver.find_element("id", "counts").text == f"+{added} \u2212{removed}"


def test_whole_files_are_shown_to_the_letter(page):
    """Every line of both sides, at its number."""
    driver = page(f"#diff={PAIR[0]}..{PAIR[1]}")
    driver.find_element("id", "whole").click()
    for side, name in zip(("old", "new"), PAIR, strict=True):
        script = (
            f"return [...document.querySelectorAll('#code > .{side}:not(.gap)')]"
            ".map(x => [+x.dataset.line, x.textContent])"
        )
        lines = sorted(driver.execute_script(script))
        assert [text for _, text in lines] == (ROOT / name).read_text().splitlines()
        assert [number for number, _ in lines] == [*range(1, len(lines) + 1)]


def test_the_records_come_out_as_they_went_in(page, folder):
    """Byte for byte, by the page's own button and by its packed text."""
    driver = page()
    wanted = (folder / records.NAME).read_bytes()
    driver.execute_cdp_cmd(
        "Page.setDownloadBehavior",
        {"behavior": "allow", "downloadPath": str(folder / "downloads")},
    )
    driver.find_element("css selector", f"[data-file='{records.NAME}']").click()
    deadline = time.monotonic() + 20
    saved = folder / "downloads" / records.NAME
    while not saved.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert saved.read_bytes() == wanted
    packed = re.search(
        rf'data-file="{records.NAME}".*?<script type="text/plain">(.*?)</script>',
        (folder / report.NAME).read_text(),
    )
    assert gzip.decompress(base64.b64decode(packed[1])) == wanted


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_it_fits_every_screen(width, page):
    """The page is never wider than the screen; only the table scrolls, within itself."""
    driver = page(f"#diff={PAIR[0]}..{PAIR[1]}", width)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.find_element("css selector", "#code ins").is_displayed()


def test_it_is_dark_where_the_reader_wants_it_dark(page):
    """By the system's setting."""
    driver = page()
    colours = []
    for scheme in ("light", "dark"):
        wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
        body = driver.find_element("css selector", "body")
        colours.append(body.value_of_css_property("background-color"))
    rgb = [[int(x) for x in re.findall(r"\d+", colour)[:3]] for colour in colours]
    assert min(rgb[0]) > 200 and max(rgb[1]) < 60


def test_a_fold_and_a_plot_open_by_the_keyboard(page):
    """The lines that were left out come into view; the plot stands in a dialog until Escape."""
    from selenium.webdriver.common.keys import Keys

    driver = page(f"#diff={PAIR[0]}..{PAIR[1]}")
    fold = driver.find_element("css selector", "#code .fold")
    (count,) = re.findall(r"\d+", fold.text)
    hidden = driver.find_elements("css selector", "#code .new[hidden]")
    fold.send_keys(Keys.ENTER)
    assert fold.get_attribute("aria-expanded") == "true"
    left = driver.find_elements("css selector", "#code .new[hidden]")
    assert len(hidden) - len(left) == int(count)
    driver.find_element("css selector", "#plots figure button").send_keys(Keys.ENTER)
    dialog = driver.find_element("css selector", "dialog")
    assert dialog.is_displayed()
    titles = [dialog.find_element("id", "large-title").text]
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_LEFT):
        dialog.find_element("id", "next").send_keys(key)
        titles.append(dialog.find_element("id", "large-title").text)
    questions = [x.text for x in driver.find_elements("css selector", "figcaption strong")]
    assert titles == [questions[0], questions[1], questions[0], questions[-1]]
    assert dialog.find_element("css selector", "svg").is_displayed()
    dialog.find_element("css selector", "button").send_keys(Keys.ESCAPE)
    assert not dialog.is_displayed()


def test_a_wrapped_line_of_code_keeps_its_indent(page):
    """What does not fit stands two letters further in than the line's own beginning."""
    driver = page("#diff=snsc.py..mnmc_ddp_launch.py", 400)
    script = """
    const found = [];
    for (const line of document.querySelectorAll("#code > ins")) {
      const text = line.textContent, indent = text.match(/^ */)[0].length;
      const range = document.createRange();
      range.selectNodeContents(line);
      const lefts = [...new Set([...range.getClientRects()].map(r => Math.round(r.top)))];
      if (indent < 4 || lefts.length < 2) continue;
      const style = getComputedStyle(line);
      found.push([indent, parseFloat(style.paddingLeft), parseFloat(style.textIndent)]);
    }
    const ruler = document.createElement("code");
    ruler.style.paddingLeft = "100ch";
    document.querySelector("#code").append(ruler);
    return [found, parseFloat(getComputedStyle(ruler).paddingLeft) / 100];"""
    found, letter = driver.execute_script(script)
    assert len(found) > 3
    for indent, padding, first in found:
        assert first == pytest.approx(-(indent + 2) * letter, abs=1)
        assert padding > (indent + 2) * letter


def test_changed_words_are_marked_within_a_line(page):
    """By ranges of the text, which stays as it is: here the launcher that the first line names."""
    driver = page("#diff=mnmc_ddp_launch.py..mnmc_ddp_mp.py")
    script = "return [...CSS.highlights.get(arguments[0])].map(r => r.startContainer.data.slice("
    for name, word in (("removed", "torchrun"), ("added", "spawn")):
        marked = driver.execute_script(script + "r.startOffset, r.endOffset))", name)
        assert word in marked


def test_all_pairs_can_be_chosen_and_agree_with_diff(page):
    """The techniques too, and either way round; where diff takes more lines than it needs, the page
    may take fewer.
    """
    driver = page()
    names = driver.execute_script("return Object.keys(files)")
    assert set(names) == {
        *(name for pair in PAIRS for name in pair),
        *(f"techniques/{name}.py" for name in TECHNIQUES),
    }
    script = "location.hash = arguments[0]; follow(); return [$('#counts').textContent, address()]"
    for old in names:
        new = names[(names.index(old) + 3) % len(names)]
        for pair in ((old, new), (new, old)):
            most, least = (counts(diff(*pair, minimal=minimal)) for minimal in (False, True))
            where = f"#diff={pair[0]}..{pair[1]}"
            shown, address = driver.execute_script(script, where)
            added, removed = (int(number[1:]) for number in shown.split())
            assert least[0] <= added <= most[0] and added - removed == least[0] - least[1], where
            assert address == where


def test_nothing_is_loaded_and_a_foreign_address_is_no_error(page):
    """All that the browser took is in the file; a link to a script of another time opens as is."""
    driver = page("#diff=gone.py..toString")
    script = "return performance.getEntriesByType('resource').map(x => x.name)"
    assert [x for x in driver.execute_script(script) if not x.startswith("data:")] == []
    assert driver.find_element("id", "counts").text


def test_the_page_is_small_and_needs_nothing_else(folder):
    """Under 3 MB, and no address in it that a browser would load; every plot is there."""
    text = (folder / report.NAME).read_text()
    assert len(text) < 3_000_000
    assert not re.search(
        r"""(src|href|action)\s*=\s*["']?\s*(https?:|//)|url\((?!#)|@import""", text
    )
    names = re.findall('<figure id="plot-([a-z]+)">', text)
    assert names == "throughput ratios loss accuracy code steps memory drift".split()
    assert text.count("<svg") == len(names) and "<img" not in text
    assert json.dumps("snsc.py") in text
