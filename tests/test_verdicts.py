"""mistakes/verdicts.py on made-up runs: crash, hang, silent, no effect here."""

from pathlib import Path

import pytest

from mistakes.verdicts import Ran, error, judge, shortened, shown


def ran(folder: Path, code: int = 0, err: str = "", steps: int = 2, times: int = 1, **changes):
    """What a run of one epoch of two steps left; changes: to all of its records."""
    records = [{"event": "start", "world_size": 2}]
    for step in range(1, steps + 1):
        record = {"event": "train", "epoch": 1, "step": step, "images": 64, "loss": 2.0 / step}
        records += times * [record | changes.get("train", {})]
    evaluated = {"event": "eval", "epoch": 1, "images": 101, "loss": 1.5}
    records += [evaluated | changes.get("eval", {}), {"event": "end"}]
    return Ran(code, err, records, folder)


def judged(run: Ran, folder: Path) -> dict:
    return judge(run, lambda: ran(folder), lambda: ran(folder))


TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/tmp/x/script.py", line 7, in main
[rank1]: RuntimeError: [/a/pair.cc:545] Read error [127.0.0.1]:14233: Connection reset by peer.
Traceback (most recent call last):
  File "/tmp/x/script.py", line 448, in <module>
ValueError: no `group` in /home/me/file.py
E1121 21:30:12 14529 torch/distributed/elastic/api.py:1002] failed (exitcode: 1) local_rank: 0
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============
  time      : 2026-11-21_21:30:12
"""
THROWN = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /a/pair.cc:464] op.preamble.length <= op.nbytes. 94 vs 8. Mismatch?
"""


def test_crash(tmp_path):
    """What went wrong first, not what followed from it, without folders of this machine."""
    found = judged(ran(tmp_path, 1, TORCHRUN), tmp_path)
    assert found["kind"] == "crash" and found["facts"] == {"error": "ValueError", "step": 2}
    assert found["text"] == "after step 2, `ValueError: no 'group' in file.py`"
    assert error(THROWN) == ("EnforceNotMet", "op.preamble.length <= op.nbytes. 94 vs 8. Mismatch?")
    assert (
        judged(ran(tmp_path, 3, steps=0), tmp_path)["text"]
        == "before step 1 is logged, `exit code 3`"
    )


@pytest.mark.parametrize("before", ["", "[rank1]: ", "[1]<stderr>:"])
def test_a_message_of_the_script_itself(before):
    """sys.exit("...") prints it as it is, between the lines of a launcher and of Python."""
    line = "--data /tmp/x/images: train/ and val/ have different class folders"
    report = (
        "E1121 21:30:12 14529 api.py:1002] failed\nTraceback (most recent call last):\n  File x\n"
    )
    said = f"W1121 torchrun\nx.py:1: UserWarning: old\n{before}{line}\n{report}"
    assert error(said) == ("", line.replace("/tmp/x/", ""))
    assert shortened("word " * 99).endswith("word ...") and len(shortened("word " * 99)) <= 180


def test_hang(tmp_path):
    run = ran(tmp_path, -15)
    run.records = run.records[:2]
    run.stuck = {"0": "loss.backward()", "1": "dist.broadcast(buffer)"}
    found = judged(run, tmp_path)
    assert found["kind"] == "hang" and found["facts"] == {"lines": run.stuck, "step": 1}
    assert "rank 1 waits in `dist.broadcast(buffer)`. The last line" in found["text"]
    assert "`train` of step 1." in found["text"]
    run.records, run.stuck = [], {}
    assert judged(run, tmp_path)["text"].endswith("Nothing was printed.")


@pytest.mark.parametrize(
    "changes, facts, words",
    [
        ({"train": {"images": 32}}, {"step": [32, 64]}, "a step counts 32 images instead of 64"),
        ({"eval": {"images": 202}}, {"test": [202, 101]}, "101 test images are counted as 202"),
        (
            {"steps": 3},
            {"epoch": [3, 2]},
            "3 steps instead of 2 and counts 192 images",
        ),
        ({"eval": {"epoch": 2}}, {"evals": [1, 1]}, "it evaluates 1 times instead of 1"),
    ],
)
def test_counts(tmp_path, changes, facts, words):
    found = judged(ran(tmp_path, **changes), tmp_path)
    assert found["kind"] == "silent" and found["facts"] == facts and words in found["text"]


def two_epochs(folder: Path, *steps: int) -> Ran:
    """Of so many steps each; their numbers count on by those of the first."""
    records = []
    for epoch, count in enumerate(steps, start=1):
        for step in range(1, count + 1):
            number = step + (epoch - 1) * steps[0]
            records.append({"event": "train", "epoch": epoch, "step": number})
            records[-1] |= {"images": 64, "loss": 1.0}
        records.append({"event": "eval", "epoch": epoch, "images": 101, "loss": 1.5})
    return Ran(0, "", records, folder)


def test_a_later_epoch_that_is_shorter_is_a_count(tmp_path):
    right = two_epochs(tmp_path, 3, 3)

    def against_right(run: Ran) -> dict:
        return judge(run, lambda: right, lambda: right)

    found = against_right(two_epochs(tmp_path, 3, 1))
    assert found["kind"] == "silent" and found["facts"] == {"epoch": [1, 3]}
    assert found["text"] == "epoch 2 has 1 steps instead of 3 and counts 64 images instead of 192."
    assert against_right(two_epochs(tmp_path, 3, 3))["kind"] == "no effect here"
    run = two_epochs(tmp_path, 3, 3)
    run.records[5]["step"] = 9
    assert against_right(run)["facts"] == {"missing": 5}
    run = two_epochs(tmp_path, 3, 3)
    run.records[-1]["images"] = 50
    assert against_right(run)["facts"] == {"test": [50, 101]}


def test_wrong_losses(tmp_path):
    run = ran(tmp_path)
    run.records[2]["loss"] = 1.1  # of step 2
    found = judged(run, tmp_path)
    assert found["kind"] == "silent" and found["facts"] == {"step": 2}
    assert "from step 2 the loss is wrong: 1.1000 instead of 1.0000" in found["text"]
    run.records[2]["loss"] = None
    found = judged(run, tmp_path)
    assert found["kind"] == "NaN" and found["facts"] == {"step": 2}
    assert found["text"] == "from step 2 the loss is nan instead of 1.0000."
    assert shown("NaN") == "**NaN**" and shown("silent") == "**SILENT**"
    run.records[2]["loss"] = 1.00002  # four digits would show two equal losses
    assert ": 1.000020 instead of 1.000000." in judged(run, tmp_path)["text"]
    run.records[2]["loss"] = 1 + 1e-9
    assert judged(run, tmp_path)["kind"] == "no effect here"
    found = judged(ran(tmp_path, eval={"loss": 1.6}), tmp_path)
    assert found["kind"] == "silent" and found["facts"] == {"epoch": 1}
    assert "training is right, but the test loss" in found["text"]


def test_a_loss_that_is_wrong_by_more_than_counts_as_equal(tmp_path):
    run = ran(tmp_path)

    def judged_within(within: float) -> dict:
        return judge(run, lambda: ran(tmp_path), lambda: ran(tmp_path), within)

    run.records[2]["loss"] = 1.01  # of step 2, instead of 1
    run.records[3]["loss"] = 1.51  # of the test, instead of 1.5
    found = judged_within(0.02)
    assert (found["kind"], found["text"]) == ("no effect here", "no loss is wrong by more than 2%.")
    found = judged_within(0.005)
    assert found["facts"] == {"step": 2}
    assert "from step 2 the loss is wrong: 1.0100 instead" in found["text"]
    run.records[2]["loss"], run.records[3]["loss"] = 1.0, 1.6
    found = judged_within(0.02)
    assert found["facts"] == {"epoch": 1} and "training is right within 2%, but" in found["text"]
    run.records[3]["loss"] = None
    found = judged_within(0.02)
    assert (found["kind"], found["facts"]) == ("NaN", {"epoch": 1})


def saved(folder: Path, value: float | list[float], prefix: str = "") -> Ran:
    """A run that saved a checkpoint with one weight."""
    import torch

    folder.mkdir()
    run = ran(folder)
    run.weights = folder / "weights"
    torch.save({"model": {f"{prefix}weight": torch.tensor([value])}, "epoch": 1}, run.weights)
    return run


def test_wrong_weights_or_other_names(tmp_path):
    """The oracle saves the weights, a script a checkpoint with them."""
    import torch

    right, other = saved(tmp_path / "right", 1.0), saved(tmp_path / "other", 2.0)
    named, none = saved(tmp_path / "named", 1.0, "module."), saved(tmp_path / "none", 1.0)
    compiled = saved(tmp_path / "compiled", 1.0, "_orig_mod.module.")
    near, alien = saved(tmp_path / "near", 1.01), saved(tmp_path / "alien", 1.0, "fc.")
    wide, empty = saved(tmp_path / "wide", [1.0, 1.0]), saved(tmp_path / "empty", 1.0)
    torch.save({"model": {}}, empty.weights)
    none.weights.unlink()
    torch.save(torch.load(right.weights)["model"], right.weights)

    def kind(run, within=0.0):
        found = judge(run, lambda: right, lambda: right, within)
        return found["kind"], found["facts"]

    assert kind(right) == ("no effect here", {})
    assert kind(other) == ("silent", {"weights": "wrong"})
    assert kind(none) == ("silent", {"weights": "none"})
    assert kind(named) == ("silent", {"prefix": "module."})
    assert kind(compiled) == ("silent", {"prefix": "_orig_mod.module."})
    for run, within in ((near, 0.0), (alien, 0.0), (other, 0.02), (empty, 0.0), (wide, 0.02)):
        assert kind(run, within) == ("silent", {"weights": "wrong"})
    assert kind(near, 0.02) == ("no effect here", {})


def test_more_lines_than_the_whole_script_prints(tmp_path):
    twice = judged(ran(tmp_path, times=2), tmp_path)
    assert twice["kind"] == "no effect here"
    assert twice["facts"] == {"times": {"train": [4, 2]}}
    assert "4 `train` lines instead of 2" in twice["text"]
    assert judged(ran(tmp_path), tmp_path)["text"] == ""
    found = judge(ran(tmp_path, times=2), lambda: ran(tmp_path), lambda: ran(tmp_path, times=2))
    assert found["text"] == ""
