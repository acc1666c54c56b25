"""docs/diffs/: the pages are cut as their markers say, and what they claim is what happens."""

import json
import re
import shutil
from pathlib import Path

import pytest

from bench import ROOT, UserError
from bench.ladder import SCRIPTS
from bench.process import Failed
from mistakes import measure as command
from mistakes.measure import check, main, measure
from mistakes.outcomes import FOLDER, OUTCOMES, read, settings, write
from mistakes.page import BadPage, essence, fingerprint, parse
from mistakes.trials import Lab, Trial
from mistakes.verdicts import Ran

OLD = "one\ntwo\nthree\nfour\nfive\nsix\n"
NEW = "one\n# now\nTWO(\n    2\n)\nthree\nFOUR\nfive\nsix\nseven\n"
PAGE = """<!-- diff old.py new.py -->
<!-- piece a: -two -->
<!-- end a -->
<!-- piece b: -four
instead:     4
save: no
-->
<!-- end b -->
<!-- piece c: seven -->
<!-- end c -->
"""


@pytest.fixture
def made_up(tmp_path):
    """A function that parses a page on OLD and NEW."""

    def made(text: str = PAGE, old: str = OLD, new: str = NEW):
        (tmp_path / "old.py").write_text(old)
        (tmp_path / "new.py").write_text(new)
        (tmp_path / "page.md").write_text(text)
        return parse(tmp_path / "page.md", tmp_path)

    return made


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("-two", "-TWO", "piece a: its anchor '-TWO' is in no changed line"),
        ("-two", "TWO(", "no piece has the first changed line: -two"),
        ("save: no", "without: c", "'without: c' is none of the options"),
        ("<!-- end a -->", "", "piece a: give it an anchor, a name of its own, and an end"),
        ("new.py", "gone.py", "gone.py: there is no such script"),
    ],
)
def test_a_mistake_in_a_page_is_one_line(made_up, old, new, words):
    with pytest.raises(BadPage, match=re.escape(words)) as caught:
        made_up(PAGE.replace(old, new))
    assert "\n" not in str(caught.value)


def test_comments_do_not_count_code_does(made_up):
    one = 'def f():\n    """Doc."""\n    return add("#", help="words")  # why\n'
    other = 'def f():\n    return add(\n        "#",\n        help="more",\n    )\n'
    assert essence(one) == essence(other) != essence(other.replace("#", "-"))
    assert essence("no python") == "no python"
    page = made_up()
    before = fingerprint(page.trial("a"))
    commented = made_up(new=NEW.replace("# now", "# then"))
    assert fingerprint(commented.trial("a")) == before
    other = made_up(new=NEW.replace("seven", "eight"), text=PAGE.replace("seven", "eight"))
    assert fingerprint(other.trial("a")) != before
    other = made_up(PAGE.replace("-two", "-two\nflags: --lr 1"))
    assert fingerprint(other.trial("a")) != before


def test_the_whole_script_must_be_within_what_counts_as_equal(monkeypatch):
    """Otherwise the loss is not wrong because of the piece."""

    def ran(folder: Path, loss: float) -> Ran:
        folder.mkdir(exist_ok=True)
        step = {"event": "train", "epoch": 1, "step": 1, "images": 64, "loss": loss}
        test = {"event": "eval", "epoch": 1, "images": 101, "loss": 2.0}
        return Ran(0, "", [step, test], folder)

    def run(self, trial):
        return ran(self.folder / trial.text, {"whole": 1.5, "without": 3.0}[trial.text])

    def found(exact: float) -> dict:
        monkeypatch.setattr(Lab, "run", run)
        monkeypatch.setattr(Lab, "exact", lambda self, trial: ran(self.folder, exact))
        with Lab() as lab:
            return lab.outcome(Trial("new.py", "without", save=False, within=0.02), "whole")

    assert found(1.51)["text"].startswith("from step 1 the loss is wrong: ")
    with pytest.raises(Failed, match=r"the whole new\.py is not right: from step 1"):
        found(1.6)


# The pages as they are.


@pytest.mark.parametrize("script", [path for path, entry in SCRIPTS.items() if entry.parent])
def test_its_page_is_up_to_date(script):
    """There is one, its blocks are the real diff, its outcomes are of today's code, and what has no
    effect says why it stays.
    """
    assert check(FOLDER, [Path(script).stem]) == []


@pytest.fixture
def copied(tmp_path):
    """The launch page and the outcomes in another folder."""
    shutil.copy(FOLDER / "mnmc_ddp_launch.md", tmp_path)
    write(tmp_path, {"mnmc_ddp_launch": read(FOLDER)["mnmc_ddp_launch"]}, settings(FOLDER))
    assert check(tmp_path) == []
    return tmp_path


def mistaken(folder: Path, old: str, new: str, file: str = "mnmc_ddp_launch.md") -> list[str]:
    """What check finds once a page has a mistake; a line each, on that page."""
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    found = check(folder)
    assert all(line.startswith("mnmc_ddp_launch.md: ") and "\n" not in line for line in found)
    return found


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("**CRASH** with", "**HANG** with", "not up to date"),
        ("**Why the change stays:**", "It stays:", "no effect here"),
    ],
)
def test_a_mistake_in_the_real_page_is_found(copied, old, new, words):
    (line,) = mistaken(copied, old, new)
    assert words in line


def test_outcomes_that_do_not_belong_to_the_page_are_found(copied):
    known = json.loads((copied / OUTCOMES).read_text())
    page = known["mnmc_ddp_launch"]
    old = page["group"]["code"]
    (line,) = mistaken(copied, old, "0" * len(old), OUTCOMES)
    assert "piece group: measured with other code" in line
    page["more"] = page.pop("group")
    del known["settings"]
    write(copied, known | {"left": {}}, settings(copied))
    found = "\n".join(check(copied))
    assert "piece group: not measured" in found and "has more, which the page lacks" in found
    assert f"{OUTCOMES}: left: there is no such page with a diff" in found


def test_the_command(copied, capsys):
    def says(*argv, code):
        assert main([*argv], copied) == code
        return capsys.readouterr().err

    assert says("--check", code=0) == ""
    assert says("mnmc_ddp_launch", "docs/diffs/mnmc_ddp_launch.md", "--check", code=0) == ""
    with pytest.raises(UserError, match="--chek"):
        main(["--chek"], copied)
    with pytest.raises(BadPage, match="gone: there is no such page"):
        main(["gone"], copied)
    assert mistaken(copied, "```diff", "```dif")
    assert says("--check", code=1).count("\n") == 1
    assert says(code=0) == ""  # nothing to measure, only to write
    assert says("--check", code=0) == ""


def test_what_was_measured_with_another_oracle_is_stale(copied, monkeypatch, tmp_path):
    """All of a page's outcomes, each by name; comments do not count. Measured again, none."""
    text, other = (ROOT / "bench" / "oracle.py").read_text(), tmp_path / "oracle.py"
    monkeypatch.setitem(command.FILES, "oracle", other)
    other.write_text("# a comment\n" + text.replace("It splits each", "It cuts each"))
    assert check(copied) == []
    other.write_text(text.replace("128) / 64", "127) / 64"))
    found, ran = check(copied), []
    assert len(found) == len(read(copied)["mnmc_ddp_launch"]) == 14
    assert all(f": measured with another {other}: python" in line for line in found)

    def outcome(self, trial, whole):
        ran.append(trial)
        return {"kind": "silent", "facts": {}, "text": "new."}

    monkeypatch.setattr(Lab, "outcome", outcome)
    assert main([], copied) == 0 and len(ran) == 14
    assert check(copied) == [] and len(settings(copied)) == 1


def test_a_piece_that_fails_keeps_its_outcome_and_the_others_are_written(
    copied, capsys, monkeypatch
):
    def outcome(self, trial, whole):
        if "init_process_group" not in trial.text:
            raise Failed("its oracle failed")
        return {"kind": "silent", "facts": {}, "text": "new."}

    monkeypatch.setattr(Lab, "outcome", outcome)
    before = read(copied)["mnmc_ddp_launch"]["group"]
    assert main(["--again"], copied) == 1
    line = "mistakes measure: mnmc_ddp_launch.md: piece group: its oracle failed\n"
    assert capsys.readouterr().err.endswith(line)
    found = read(copied)["mnmc_ddp_launch"]
    assert found["group"] == before and found["forward"]["text"] == "new."
    assert check(copied) == []


@pytest.mark.full
def test_what_the_launch_page_says_is_what_happens():
    """A piece is taken back once more: the same kind, and the facts of every machine.

    test_mistakes.py has a silent one; all by `python -m mistakes measure --again`, which needs all
    launchers.
    """
    page, found = parse(FOLDER / "mnmc_ddp_launch.md"), {}
    known = read(FOLDER)[page.name]["group"]
    assert measure(page, ["group"], print, found) == [] and known["kind"] == "crash"
    now = json.loads(json.dumps(found["group"]))
    assert (now["kind"], now["facts"]) == (known["kind"], known["facts"])
