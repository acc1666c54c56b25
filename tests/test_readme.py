"""README.md and docs/: links that lead somewhere, commands that exist, and nothing out of date."""

import argparse
import re
import shlex
from statistics import median

import pytest
from support import ROOT, SCRIPTS

from bench.options import add_flags
from bench.show.summary import timed
from docs.make import logs, tables
from docs.make.__main__ import main

README = ROOT / "README.md"
START = ROOT / "docs" / "howto" / "start.md"
CHINESE = ROOT / "README.zh-CN.md"
PAGES = [README, CHINESE, ROOT / "CONTRIBUTING.md", ROOT / "data" / "README.md"]
PAGES += [ROOT / "techniques" / "README.md", *ROOT.glob("docs/**/*.md")]
TEST = "bash tests/run_all.sh"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def named(path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A page without its code, where brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def commands() -> list[str]:
    """The lines of the code blocks of the README and of the page to start with."""
    text = (README.read_text() + START.read_text()).replace("\\\n", "")
    blocks = "".join(code for kind, code in FENCE.findall(text) if kind == "bash")
    lines = (" ".join(shlex.split(line, comments=True)) for line in blocks.splitlines())
    return [line for line in lines if line]


def links(text: str) -> list[str]:
    """Where a page leads: [text](here), [text]: here, and src="here"."""
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    return found + re.findall(r"^\[[^]]+\]: (\S+)$", text, flags=re.M)


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", text), flags=re.M)
    words = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).strip().lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in words}


def facts(text: str) -> list[dict[str, list[str]]]:
    """What a section of the README says in any language: its commands, code, links and figures."""
    found = []
    for section in re.sub(r"<!-- .*? -->|(?<=alt=)\"[^\"]*\"", "", text).split("\n## "):
        plain = FENCE.sub("", section)
        code = "".join(code for _, code in FENCE.findall(section)).replace("\\\n", "")
        lines = [shlex.split(line, comments=True) for line in code.splitlines()]
        known = {"commands": lines, "code": re.findall(r"`[^`\n]+`", plain)}
        known["links"] = [x for x in links(plain) if x not in ("README.md", CHINESE.name)]
        known["figures"] = re.findall(r"\d+(?:[.,]\d+)*", section)
        found.append({kind: sorted(values) for kind, values in known.items()})
    return found


def test_the_chinese_readme_says_the_same():
    """Section by section. After a change of README.md, README.zh-CN.md is changed by hand."""
    english, chinese = (facts(path.read_text()) for path in (README, CHINESE))
    assert len(english) == len(chinese) > 5
    for one, other in zip(english, chinese, strict=True):
        for kind, values in one.items():
            found = [x for x in other[kind] if x not in values]
            assert other[kind] == values, f"{kind} only in {CHINESE.name}: {found}"


def test_the_index_leads_to_every_page():
    """All but the diffs, which their scripts' pages and the list of techniques lead to."""
    index = ROOT / "docs" / "README.md"
    found = {(index.parent / link.partition("#")[0]).resolve() for link in links(index.read_text())}
    pages = {page for page in PAGES if ROOT / "docs" in page.parents and page != index}
    assert {page for page in pages if page.parent.name != "diffs"} <= found


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page):
    """And every [text][name] is defined."""
    text = prose(page.read_text())
    wrong = []
    for link in links(text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or ROOT not in [path, *path.parents]:
            wrong.append(link)
        elif anchor and anchor not in anchors(path.read_text()):
            wrong.append(link)
    assert not wrong
    defined = set(re.findall(r"^\[([^]]+)\]: ", text, flags=re.M))
    assert set(re.findall(r"\]\[([^]]+)\]", text)) <= defined


def test_the_generated_parts_are_current(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_every_command_names_a_file_that_is_there():
    """Those that name a script or a file of ours, which all but git's do."""
    own = re.compile(r"[\w./-]+\.(?:py|sh|sbatch)$")
    for command in commands():
        names = [word for word in command.split() if own.match(word)]
        assert all((ROOT / name).is_file() for name in names), command
        assert names or command == ". .venv/bin/activate", command


def test_the_readme_shows_every_script_of_the_ladder():
    """And what a script's docstring says it is started by. The page on techniques has theirs."""
    shown = commands()
    techniques = ROOT / "techniques" / "README.md"
    assert "techniques/README.md" in links(README.read_text())
    pages = {f"../docs/diffs/{path.stem}.md" for path in techniques.parent.glob("*.py")}
    assert pages <= set(links(techniques.read_text()))
    for script in SCRIPTS:
        if not script.startswith("techniques/"):
            first = (ROOT / script).read_text().splitlines()[2]
            assert first in shown, script


def test_the_test_command_is_the_one_that_ci_runs():
    assert TEST in commands() and f"{TEST} --full --install" in commands()
    (line,) = [x for x in (ROOT / ".ci" / "run").read_text().splitlines() if x.startswith("exec ")]
    assert line.removeprefix("exec ").startswith(f"{TEST} --full ")


def flags(name: str) -> set[str]:
    """The flags that a Python file adds to its parser."""
    return set(re.findall(r'add\(\s*"(--[\w-]+)"', (ROOT / name).read_text()))


def explained() -> set[str]:
    """The flags that have a row in docs/reference/flags.md."""
    text = (ROOT / "docs" / "reference" / "flags.md").read_text()
    return set(re.findall(r"^\|.*?`(--[\w-]+)` \|", text, flags=re.M))


def test_the_flags_of_the_scripts_are_explained_and_no_others():
    assert explained() == set().union(*map(flags, SCRIPTS))


def test_every_flag_of_the_benchmark_is_explained():
    text = (ROOT / "docs" / "reference" / "benchmark.md").read_text()
    (run,) = re.findall("^## Flags$(.*?)^## ", text, flags=re.M | re.S)
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    assert set(re.findall(r"`(--[\w-]+)`[,| ]", run)) >= {*parser._option_string_actions}
    assert flags("bench/__main__.py") <= set(re.findall(r"`(--[\w-]+)`", text))


def test_the_readme_says_what_was_timed_on_gpus():
    text = " ".join(README.read_text().split())
    claim = "The scripts' speeds are from CPUs" in text
    assert claim == (not any(run.gpus for run in logs.runs("*")))
    lines = logs.lines_of(logs.LOGS / "1-h200-torch2.11" / "throughput.jsonl")
    way = ("resnet50:224:256", "bf16+channels_last+compile")
    speeds = [line["images_per_second"] for line in lines if (line["size"], line["way"]) == way]
    assert f"trains [{median(speeds):,.0f} images/s]" in text


def test_every_technique_in_logs_is_in_a_table_of_costs():
    """Also one that was renamed since, or that changed its group."""
    pages = {x.page for x in tables.PARTS if x.files == tables.TIMED}
    shown = "".join((ROOT / page).read_text() for page in pages)
    for run in logs.runs("techniques*"):
        for row in timed(run.rows):
            assert f"| {row['technique']} |" in shown or not row["technique"]
