"""docs/diffs/: the pages are cut as their markers say, and what they claim is what happens."""

import json
import re
import shutil
from itertools import chain
from pathlib import Path

import pytest

from bench import ROOT, UserError
from bench.ladder import SCRIPTS
from bench.process import Failed
from mistakes import measure as command
from mistakes import trials
from mistakes.measure import check, main, measure, setting
from mistakes.outcomes import FOLDER, KINDS, OUTCOMES, measured, read, render, settings, write
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
def made_up(tmp_path, monkeypatch):
    """A function that parses a page on OLD and NEW. Two pieces are enough for a table."""
    monkeypatch.setattr("mistakes.outcomes.MANY", 2)

    def made(text: str = PAGE, old: str = OLD, new: str = NEW):
        (tmp_path / "old.py").write_text(old)
        (tmp_path / "new.py").write_text(new)
        (tmp_path / "page.md").write_text(text)
        return parse(tmp_path / "page.md", tmp_path)

    return made


def changed(page) -> list[list[str]]:
    """The changed lines of each piece."""
    return [[page.lines[n] for n in piece.lines] for piece in page.pieces.values()]


def test_the_pieces_are_all_of_the_diff(made_up):
    page = made_up()
    assert changed(page) == [
        ["-two", "+# now", "+TWO(", "+    2", "+)"],
        ["-four", "+FOUR"],
        ["+seven"],
    ]
    assert [*chain(*changed(page))] == [line for line in page.lines if line[0] != " "]
    assert page.whole() == NEW


def test_an_anchor_is_looked_for_behind_the_one_before(made_up):
    """The same words twice are two pieces; the second one ends where the next begins."""
    text = "<!-- diff old.py new.py -->\n"
    for name, anchor in (("x", "o"), ("y", "o"), ("z", "o")):
        text += f"<!-- piece {name}: {anchor} -->\n<!-- end {name} -->\n"
    page = made_up(text)
    assert [lines[0] for lines in changed(page)] == ["-two", "+# now", "-four"]


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("-two", "-TWO", "piece a: its anchor '-TWO' is in no changed line"),
        ("-four", "-two", "piece b: its anchor '-two' comes before the piece above it"),
        ("-two", "TWO(", "no piece has the first changed line: -two"),
        ("seven", "three", "piece c: its anchor 'three' is in no changed line"),
        ("save: no", "without: c", "'without: c' is none of the options"),
        ("save: no", "limit: soon", "piece b: limit: soon: give a number"),
        ("save: no", "within: 2", "piece b: within: 2: give a number"),
        ("<!-- end a -->", "", "piece a: give it an anchor, a name of its own, and an end"),
        ("<!-- end c -->", "", "a piece has no end"),
        ("piece c: ", "piece a: ", "piece a: give it an anchor"),
        ("<!-- diff old.py new.py -->", "", "it has no <!-- diff OLD NEW -->"),
        ("new.py", "gone.py", "gone.py: there is no such script"),
        ("new.py", "old.py", "old.py and old.py are equal"),
    ],
)
def test_a_mistake_in_a_page_is_one_line(made_up, old, new, words):
    with pytest.raises(BadPage, match=re.escape(words)) as caught:
        made_up(PAGE.replace(old, new))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("anchor", "piece", "was", "instead"),
    [
        ("-two", "a", "# now\nTWO(\n    2\n)\n", "two\n"),  # it is taken back
        ("-two", "c", "seven\n", ""),
        ("-two", "b", "FOUR", "    4"),  # other code
        ("-two\ninstead:", "a", "# now\nTWO(\n    2\n)\n", ""),  # nothing, not even the old code
    ],
)
def test_what_stands_instead_of_a_piece(made_up, anchor, piece, was, instead):
    assert made_up(PAGE.replace("-two", anchor)).mutated(piece) == NEW.replace(was, instead)


def test_code_goes_to_the_first_new_line_of_code(made_up):
    """Behind an unchanged line that stands between a comment and its code."""
    text = PAGE.replace("-two", "# now\ninstead: 2").replace("-four", "FOUR")
    page = made_up(text, old="one\n", new="# now\none\nTWO\nFOUR\nseven\n")
    assert page.mutated("a") == "one\n2\nFOUR\nseven\n"


def test_options_of_the_page_hold_for_all_pieces(made_up):
    """The oracle gets the flags that it knows."""
    text = PAGE.replace("new.py", "new.py\nflags: --lr 1 --hook own\nwithin: 0.02\n")
    text = text.replace("save: no", "flags: --lr 2\nwithin: 0.5\nlimit: 9\nsave: no\nkill: 3")
    page = made_up(text)
    oracle = ("--parts", "2", "--split", "strided")
    wanted = Trial(
        "new.py", page.mutated("a"), 2, oracle, ("--lr", "1"), ("--hook", "own"), within=0.02
    )
    assert page.trial("a") == wanted
    flags, own = ("--lr", "1", "--lr", "2"), ("--hook", "own")
    wanted = Trial("new.py", page.mutated("b"), 2, oracle, flags, own, 9.0, False, 0.5, 3)
    assert page.trial("b") == wanted


def test_the_registry_says_how_many_processes_run_and_what_the_oracle_does(made_up):
    page = made_up()
    page.new = "snmc_dp.py"
    assert page.trial("a").processes == 1 and page.trial("a").oracle[:2] == ("--parts", "1")
    page.new = "mnmc_ddp_mp.py"
    assert page.trial("a").processes == 2
    page.new = "techniques/accelerate_ddp.py"
    assert page.trial("a").oracle == ("--parts", "2", "--split", "contiguous")
    page.new = "techniques/parallel_2d.py"
    assert page.trial("a").processes == 4 and page.trial("a").oracle[-2:] == ("--parts", "2")
    assert page.trial("a").flags == ("--arch", "vit_tiny")


def outcome(kind: str, text: str = "") -> dict:
    return {"kind": kind, "text": text, "facts": {}}


def test_what_is_not_run_has_no_outcome_and_may_be_hidden(made_up):
    page = made_up(PAGE.replace("-two", "-two\nhide: words").replace("save: no", "skip: words"))
    assert measured(page) == ["c"]
    text = render(page, {name: outcome("silent") for name in page.pieces})
    assert "hide: words -->\n<!-- end a -->" in text and text.count("SILENT") == 1
    assert "+FOUR" in text


def test_the_table_has_a_row_for_each_kind_the_worst_first_and_no_missing_name(made_up):
    text = PAGE.replace(
        "-->\n", "-->\n<!-- begin outcomes -->\n<!-- end outcomes -->\n### Why `x`\n", 1
    )
    text = text.replace("save: no\n", "").replace("<!-- piece b", "### Two\n<!-- piece b")
    page = made_up(text)
    known = {
        "a": outcome("crash", "after step 1, `a`. More.") | {"facts": {"error": "KeyError"}},
        "b": outcome("silent"),
        "c": outcome("silent"),
    }
    kinds = [line for line in render(page, known).splitlines() if line.startswith("| **")]
    assert kinds == ["| **SILENT** | [Two](#two) |", "| **CRASH** | [Why `x`](#why-x) |"]
    known["a"]["facts"]["error"] = "NameError"
    known["c"]["kind"] = "no effect here"
    text = render(page, known)
    assert "**CRASH** |" not in text and "| **NO EFFECT HERE** | [Two](#two) |" in text
    assert "`python -m mistakes run page NUMBER` repeats it." in " ".join(text.split())


def test_few_pieces_have_no_table(made_up):
    page = made_up("<!-- begin outcomes -->\n<!-- end outcomes -->\n" + PAGE)
    text = render(page, {"a": outcome("silent", "it is wrong.")})
    assert "| **SILENT** |" not in text and "NUMBER` repeats it." in " ".join(text.split())


def test_flags_of_all_runs_are_named_once(made_up):
    """Under the table. An outcome names only those of its own run."""
    text = "<!-- begin outcomes -->\n<!-- end outcomes -->\n" + PAGE
    text = text.replace("new.py", "new.py\nflags: --images 192 101 --epochs 1 --lr 1")
    page = made_up(text.replace("-two -->", "-two\nflags: --lr 2\n-->"))
    text = render(page, {"a": outcome("silent", "it is wrong."), "b": outcome("hang", "it waits.")})
    assert "NUMBER` repeats it, with `--epochs 1 --lr 1`, on 192 training images." in " ".join(
        text.split()
    )
    assert "It is wrong. (Run with `--lr 2`.)" in text and "> **HANG** with `4` instead. It" in text
    assert text.count("(Run") == 1


def test_the_old_codes_comments_are_not_shown(made_up):
    """Unless the piece is nothing else."""
    old, new = "# why\none\ntwo\n# more\nthree\n", "# now\nONE\ntwo\nthree\n"
    text = PAGE[: PAGE.index("<!-- piece b")].replace("-two", "-# why")
    text += "<!-- piece b: -# more -->\n<!-- end b -->\n"
    first, second = re.findall(r"```diff\n(.*?)\n```", render(made_up(text, old, new), {}), re.S)
    assert first == "-one\n+# now\n+ONE" and second == " two\n-# more"


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
    for option in ("flags: --lr 1", "within: 0.1", "save: no", "kill: 3"):
        other = made_up(PAGE.replace("-two", f"-two\n{option}"))
        assert fingerprint(other.trial("a")) != before, option


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


def test_a_trial_in_oneflow_runs_without_the_probe(monkeypatch):
    """Its records are what it prints."""
    trial = Trial("techniques/oneflow_ddp.py", "")
    assert str(ROOT / "bench/run/probe.py") not in map(str, trial.command(Path("x.py")))
    out = "start seed=0\ntrain epoch=1 step=10 loss=2.5 images=64\neval epoch=1 loss=nan images=9\n"
    out += "train epoch=2 step=1 loss=2.25 images=64\nend\n"
    assert trials.printed(out) == [
        {"event": "train", "epoch": 1, "step": 10, "loss": 2.5, "images": 64},
        {"event": "eval", "epoch": 1, "loss": None, "images": 9},
        {"event": "train", "epoch": 2, "step": 11, "loss": 2.25, "images": 64},
    ]
    monkeypatch.setattr(trials, "ONEFLOW", ROOT / "nowhere" / "bin" / "python")
    assert trial.missing().endswith("bash bench/install_oneflow.sh nowhere")


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
        ("+    # Join the group", "+    # Leave the group", "not up to date"),
        ("**CRASH** with", "**HANG** with", "not up to date"),
        ("<!-- end outcomes -->", "", "give it one"),
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
    path = copied / "mnmc_ddp_launch.md"
    path.write_text(path.read_text().replace("<!-- piece group: #", "<!-- piece group: -#"))
    with pytest.raises(BadPage, match=r"^mnmc_ddp_launch\.md: piece group: its anchor"):
        main([], copied)


def test_what_has_no_launcher_here_is_left_as_it_was(copied, capsys, monkeypatch):
    monkeypatch.setattr(Trial, "missing", lambda self: "no torchrun")
    before = (copied / OUTCOMES).read_text()
    assert main(["--again"], copied) == 0
    assert "mnmc_ddp_launch: left as measured before: no torchrun: who" in (capsys.readouterr().err)
    assert (copied / OUTCOMES).read_text() == before


class Lone:
    """A Lab whose every run is silent; `ran` has their trials."""

    def __init__(self, monkeypatch):
        self.ran = []
        monkeypatch.setattr(Lab, "outcome", self.outcome)

    def outcome(self, trial, whole):
        self.ran.append(trial)
        return {"kind": "silent", "facts": {}, "text": "new."}


def rewritten(monkeypatch, name: str) -> None:
    """As if the oracle, the probe or torch's version were another now."""
    monkeypatch.setattr(command, "setting", lambda *words, **more: setting(*words) | {name: "x"})


@pytest.mark.parametrize(
    ("name", "words"),
    [("oracle", "bench/oracle.py"), ("probe", "bench/run/probe.py"), ("torch", "torch")],
)
def test_what_was_measured_with_something_else_is_stale(copied, monkeypatch, name, words):
    """All of a page's outcomes, each by name; measured again, none."""
    rewritten(monkeypatch, name)
    found = check(copied)
    assert len(found) == len(read(copied)["mnmc_ddp_launch"]) == 14
    assert all(f": measured with another {words}: python" in line for line in found)
    lab = Lone(monkeypatch)
    assert main([], copied) == 0 and len(lab.ran) == 14
    assert check(copied) == [] and len(settings(copied)) == 1


def test_a_setting_is_code_without_comments(copied, monkeypatch, tmp_path):
    page = parse(copied / "mnmc_ddp_launch.md")
    before = setting(page)
    assert before == setting(page, installed=False)  # the tests run on the project's torch
    text = (ROOT / "bench" / "oracle.py").read_text()
    other = tmp_path / "oracle.py"
    monkeypatch.setitem(command.FILES, "oracle", other)
    other.write_text("# a comment\n" + text.replace("It splits each", "It cuts each"))
    assert setting(page) == before
    other.write_text(text.replace("128) / 64", "127) / 64"))
    assert setting(page) != before
    page.new = "techniques/oneflow_ddp.py"
    assert setting(page) == {}


def differences(found: dict, known: dict) -> list[str]:
    """The pieces whose outcome has another kind or another fact."""
    kept = {name: (known[name]["kind"], known[name]["facts"]) for name in found}
    now = {name: (new["kind"], json.loads(json.dumps(new["facts"]))) for name, new in found.items()}
    return [f"{name}: {now[name]}, not {kept[name]}" for name in found if now[name] != kept[name]]


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


def test_a_piece_that_breaks_the_judge_does_not_lose_the_others(copied, monkeypatch):
    """A bug is a traceback; what was measured before is written all the same."""
    made = []

    def outcome(self, trial, whole):
        if len(made) == 3:
            raise KeyError(21)
        made.append(trial)
        return {"kind": "silent", "facts": {}, "text": "new."}

    monkeypatch.setattr(Lab, "outcome", outcome)
    monkeypatch.setattr(command, "AT_ONCE", 1)
    with pytest.raises(KeyError):
        main(["--again", "mnmc_ddp_launch"], copied)
    found = read(copied)["mnmc_ddp_launch"]
    assert [each["text"] for each in found.values()].count("new.") == 3
    assert check(copied) == []


AGAIN = ["draws", "group", "metrics", "log"]  # pieces of the launch page


@pytest.mark.full
def test_what_the_launch_page_says_is_what_happens():
    """A piece of each kind is taken back once more: the same kind, and the facts of every machine.

    All other pieces by `python -m mistakes measure --again`, which needs all launchers.
    """
    page = parse(FOLDER / "mnmc_ddp_launch.md")
    known = read(FOLDER)[page.name]
    assert {known[name]["kind"] for name in AGAIN} == {*KINDS} - {"NaN"}
    found = {}
    failed = measure(page, AGAIN, print, found)
    assert failed == []
    assert differences(found, known) == []
