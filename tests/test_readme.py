"""README.md and docs/: short, not too wide, links that lead somewhere, and nothing out of date."""

import re
import shlex

import pytest
from support import ROOT, SCRIPTS

from bench.readme import PARTS, logs, main

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "data" / "README.md"]
PAGES += [ROOT / "techniques" / "README.md", *ROOT.glob("docs/**/*.md")]
LINES, WIDTH = 220, 100
TEST = "bash tests/run_all.sh"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def named(path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A page without its code, where brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def commands() -> list[str]:
    """The lines of the README's code blocks, without comments."""
    blocks = "".join(code for kind, code in FENCE.findall(README.read_text()) if kind == "bash")
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


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= LINES


def test_no_table_or_code_of_the_readme_is_too_wide():
    text = README.read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    lines += [line for _, code in FENCE.findall(text) for line in code.splitlines()]
    assert lines and not [line for line in lines if len(line) > WIDTH]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page):
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


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_reference_is_defined(page):
    """[text][name] and, where another one is defined so, [name] alone."""
    text = prose(page.read_text())
    known = set(re.findall(r"^\[([^]]+)\]: ", text, flags=re.M))
    used = set(re.findall(r"\]\[([^]]+)\]", text))
    if known:
        used |= set(re.findall(r"\| \[([^]]+)\](?= \||, )", text))
    assert used <= known


def test_the_generated_parts_are_current(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", PARTS)
def test_a_missing_part_is_an_error(name):
    from bench.readme import render

    text = re.sub("<!-- begin .*? -->", "", (ROOT / name).read_text(), count=1)
    with pytest.raises(ValueError, match="must have one"):
        render(name, text)


def test_every_command_names_a_file_that_is_there():
    """Those that name a script or a file of ours, which all but git's do."""
    own = re.compile(r"[\w./-]+\.(?:py|sh|sbatch)$")
    for command in commands():
        names = [word for word in command.split() if own.match(word)]
        assert all((ROOT / name).is_file() for name in names), command
        assert names or command.startswith(("git clone", ". .venv/bin/activate")), command


def test_the_readme_shows_every_script_of_the_ladder():
    """And what a script's docstring says it is started by. The page on techniques has theirs."""
    shown = commands()
    techniques = ROOT / "techniques" / "README.md"
    assert "techniques/README.md" in links(README.read_text())
    pages = {f"../docs/ladder/{path.stem}.md" for path in techniques.parent.glob("*.py")}
    assert pages <= set(links(techniques.read_text()))
    for script in SCRIPTS:
        if not script.startswith("techniques/"):
            first = (ROOT / script).read_text().splitlines()[2]
            assert first in shown, script


def test_the_test_command_is_the_one_that_ci_runs():
    assert TEST in commands()
    (line,) = [x for x in (ROOT / ".ci" / "run").read_text().splitlines() if x.startswith("exec ")]
    assert line.removeprefix("exec ").split()[:2] == TEST.split()


def flags(name: str) -> set[str]:
    """The flags that a Python file adds to its parser."""
    return set(re.findall(r'add\(\s*"(--[\w-]+)"', (ROOT / name).read_text()))


def explained() -> set[str]:
    """The flags that have a row in docs/flags.md."""
    text = (ROOT / "docs" / "flags.md").read_text()
    return set(re.findall(r"^\|.*?`(--[\w-]+)` \|", text, flags=re.M))


def test_the_flags_of_the_scripts_are_explained_and_no_others():
    assert explained() == set().union(*map(flags, SCRIPTS))


def test_every_flag_of_the_benchmark_is_explained():
    text = (ROOT / "docs" / "measuring.md").read_text()
    assert flags("bench/__main__.py") <= set(re.findall(r"`(--[\w-]+)`", text))


def test_a_users_own_runs_are_not_published(tmp_path, monkeypatch):
    """What git does not keep would make the pages differ from one checkout to the next."""
    for folder in ("machine/bench", "runs/bench"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "table.csv").touch()
    monkeypatch.setattr(logs, "LOGS", tmp_path)
    assert logs.logged("*/bench/table.csv") == [tmp_path / "machine/bench/table.csv"]
