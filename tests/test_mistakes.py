"""python -m mistakes for readers: list, run and quiz."""

import json
import re

import pytest
from support import ROOT

from mistakes import quiz, run
from mistakes.__main__ import main
from mistakes.measure import pages
from mistakes.outcomes import FOLDER, measured, read
from mistakes.page import parse
from mistakes.trials import Lab
from mistakes.verdicts import Ran, judge

PAGE = "mnmc_ddp_launch"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """In an empty folder, on a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("runn", "the commands are"),
        ("list gone", "gone: there is no such page"),
        ("run", "PAGE, PIECE"),
        (f"run {PAGE} 99", f"99: {PAGE} has no such piece to run: python -m mistakes list {PAGE}"),
        ("run collectives 1", "collectives: this page has no diff"),
        ("quiz hint", "quiz/ has no quiz"),
        ("measure --chek", "--chek"),
    ],
)
def test_a_wrong_call_is_one_line(call, words, capsys):
    assert main(call.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("mistakes: ") and err.count("\n") == 1 and words in err


def test_list_has_a_row_for_each_piece_that_can_be_run(capsys):
    """With the number of its heading; --silent leaves the others out."""

    def rows(*argv) -> list[list[str]]:
        assert main(["list", *argv]) == 0
        return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]

    outcomes = [outcome["kind"] for page in read(FOLDER).values() for outcome in page.values()]
    every = rows()
    assert len(every) == len(outcomes) == sum(len(measured(parse(p))) for p in pages(FOLDER))
    silent = rows("--silent")
    assert len(silent) == outcomes.count("silent")
    assert {row[-1] for row in silent} == {"silent"}
    assert rows("mnmc_ddp_launch.md")[8] == [PAGE, *"9 forward Forward through DDP silent".split()]


@pytest.mark.parametrize("which", ["9", "forward"])
def test_a_piece_is_found_by_its_number_and_its_name(which):
    page, name = run.find(PAGE, which)
    assert (page.name, name) == (PAGE, "forward")
    assert run.title(page, name).endswith(f"docs/diffs/{PAGE}.md#9-forward-through-ddp")


def ran(folder, losses: list[float], code: int = 0) -> Ran:
    """A run with such losses."""
    step = {"event": "train", "epoch": 1, "images": 64}
    records = [step | {"step": k, "loss": loss} for k, loss in enumerate(losses, 1)]
    return Ran(code, "ValueError: no" if code else "", records, folder)


def test_run_shows_the_diff_and_both_losses_to_the_first_that_differs(
    capsys, tmp_path, monkeypatch
):
    whole = (ROOT / "mnmc_ddp_launch.py").read_text()

    def losses(self, trial) -> Ran:
        wrong = trial.text != whole
        return ran(tmp_path, [k + 0.5 + (wrong and k >= 8) / 4 for k in range(20)])

    monkeypatch.setattr(Lab, "run", losses)
    assert main(["run", PAGE, "9", "--out", "kept"]) == 0
    out = capsys.readouterr().out
    assert "-            logits = ddp_model(images)" in out
    assert "+            logits = model(images)" in out
    found = re.findall(r"^ (\d+) +(\S+) +(\S+)", out, re.M)
    wanted = [("8", "7.500000", "7.500000"), ("9", "8.500000", "8.750000")]
    assert len(found) == 9 and found[7:] == wanted
    assert "SILENT from step 9 the loss is wrong: 8.7500 instead of 8.5000." in out
    page = parse(FOLDER / f"{PAGE}.md")
    assert (tmp_path / "kept" / "mnmc_ddp_launch.py").read_text() == page.mutated("forward")
    assert main(["run", PAGE, "9", "--out", "kept"]) == 2  # it may be the reader's
    assert "kept/mnmc_ddp_launch.py: there is such a file" in capsys.readouterr().err


def test_a_script_that_fails_itself_is_said(capsys, monkeypatch):
    monkeypatch.setattr(Lab, "run", lambda self, trial: ran(self.folder, [], 1))
    assert main(["run", PAGE, "11"]) == 2
    assert "mnmc_ddp_launch.py itself fails here: ValueError: no" in capsys.readouterr().err


def test_a_quiz_is_a_script_without_a_hint_and_is_solved_by_a_right_one(
    capsys, tmp_path, monkeypatch
):
    def outcome(self, trial, whole):
        right = ran(tmp_path, [1.5, 2.5])
        mine = right if trial.text == whole else ran(tmp_path, [1.5, 2.75])
        return judge(mine, lambda: right, lambda: right)

    monkeypatch.setattr(Lab, "outcome", outcome)
    monkeypatch.setattr(Lab, "exact", lambda self, trial: None)
    assert main(["quiz", PAGE]) == 0
    known = json.loads(quiz.ANSWER.read_text())
    page, script = parse(FOLDER / f"{PAGE}.md"), tmp_path / "quiz" / "mnmc_ddp_launch.py"
    assert script.read_text() == page.mutated(known["piece"]) != page.whole()
    heading = run.title(page, known["piece"])
    found = read(FOLDER)[PAGE][known["piece"]]
    assert found["kind"] == "silent"  # what crashes needs no search
    out = capsys.readouterr().out
    assert heading not in out and found["text"] not in out

    assert main(["quiz"]) == 2 and "solve it, or delete" in capsys.readouterr().err
    assert main(["quiz", "hint"]) == 0
    out = capsys.readouterr().out
    assert found["text"] in out and heading not in out
    assert main(["quiz", "hint"]) == 0 and heading in capsys.readouterr().out

    assert main(["quiz", "check", "gone.py"]) == 2
    assert main(["quiz", "check", str(script)]) == 1
    wrong = "not yet: silent: from step 2 the loss is wrong: 2.7500 instead of 2.5000."
    assert wrong in capsys.readouterr().out
    script.write_text(page.whole())
    assert main(["quiz", "check", str(script)]) == 0
    assert "right: " in capsys.readouterr().out and not quiz.ANSWER.exists()


@pytest.mark.full
def test_a_mistake_made_for_real(capsys):
    """What the page says of it is what the reader sees."""
    assert main(["run", PAGE, "forward"]) == 0
    text = read(FOLDER)[PAGE]["forward"]["text"]
    assert f"SILENT {text}" in capsys.readouterr().out


def test_the_picture_in_the_readme_is_of_the_outcome_that_is_known():
    """It was printed by `python -m mistakes run`; its numbers are those of the page."""
    picture = (ROOT / "docs" / "learn" / "mistake.svg").read_text().replace("&#160;", " ")
    known = read(FOLDER)[PAGE]["forward"]
    assert known["kind"] == "silent" and known["text"] in picture
