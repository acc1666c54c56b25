"""mistakes/verdicts.py on made-up runs: crash, hang, silent, no effect here."""

from pathlib import Path

import pytest

from mistakes.verdicts import Ran, error, judge


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


def test_crash(tmp_path):
    """What went wrong first, not what followed from it, without folders of this machine."""
    found = judged(ran(tmp_path, 1, TORCHRUN), tmp_path)
    assert found["kind"] == "crash" and found["facts"] == {"error": "ValueError", "step": 2}
    assert found["text"] == "after step 2, `ValueError: no 'group' in file.py`"


def test_a_message_of_the_script_itself():
    """sys.exit("...") prints it as it is, between the lines of a launcher and of Python."""
    line = "--data /tmp/x/images: train/ and val/ have different class folders"
    report = (
        "E1121 21:30:12 14529 api.py:1002] failed\nTraceback (most recent call last):\n  File x\n"
    )
    said = f"W1121 torchrun\nx.py:1: UserWarning: old\n[rank1]: {line}\n{report}"
    assert error(said) == ("", line.replace("/tmp/x/", ""))


def test_hang(tmp_path):
    run = ran(tmp_path, -15)
    run.records = run.records[:2]
    run.stuck = {"0": "loss.backward()", "1": "dist.broadcast(buffer)"}
    found = judged(run, tmp_path)
    assert found["kind"] == "hang" and found["facts"] == {"lines": run.stuck, "step": 1}
    assert "rank 1 waits in `dist.broadcast(buffer)`. The last line" in found["text"]
    assert "`train` of step 1." in found["text"]


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


@pytest.mark.parametrize(
    ("loss", "within", "kind", "facts", "words"),
    [
        (1.1, 0, "silent", {"step": 2}, "from step 2 the loss is wrong: 1.1000 instead of 1.0000"),
        (
            1.00002,
            0,
            "silent",
            {"step": 2},
            ": 1.000020 instead of 1.000000.",
        ),  # not two equal ones
        (1 + 1e-9, 0, "no effect here", {}, ""),
        (None, 0, "NaN", {"step": 2}, "from step 2 the loss is nan instead of 1.0000."),
        (1.01, 0.02, "no effect here", {}, "no loss is wrong by more than 2%."),
        (1.01, 0.005, "silent", {"step": 2}, "from step 2 the loss is wrong: 1.0100 instead"),
    ],
)
def test_wrong_losses(tmp_path, loss, within, kind, facts, words):
    """Of step 2, instead of 1."""
    run = ran(tmp_path)
    run.records[2]["loss"] = loss
    found = judge(run, lambda: ran(tmp_path), lambda: ran(tmp_path), within)
    assert (found["kind"], found["facts"]) == (kind, facts) and words in found["text"]


def test_a_wrong_test_loss(tmp_path):
    found = judged(ran(tmp_path, eval={"loss": 1.6}), tmp_path)
    assert found["kind"] == "silent" and found["facts"] == {"epoch": 1}
    assert "training is right, but the test loss" in found["text"]


def saved(folder: Path, value: float | list[float], prefix: str = "") -> Ran:
    """A run that saved a checkpoint with one weight."""
    import torch

    folder.mkdir()
    run = ran(folder)
    run.weights = folder / "weights"
    torch.save({"model": {f"{prefix}weight": torch.tensor([value])}, "epoch": 1}, run.weights)
    return run


def test_wrong_weights_or_other_names(tmp_path):
    right = saved(tmp_path / "right", 1.0)
    none = saved(tmp_path / "none", 1.0)
    none.weights.unlink()
    for name, run, within, facts in (
        ("right", right, 0.0, None),
        ("none", none, 0.0, {"weights": "none"}),
        ("other", (2.0,), 0.02, {"weights": "wrong"}),
        ("near", (1.01,), 0.02, None),
        ("wide", ([1.0, 1.0],), 0.02, {"weights": "wrong"}),
        ("named", (1.0, "module."), 0.0, {"prefix": "module."}),
        ("alien", (1.0, "fc."), 0.0, {"weights": "wrong"}),
    ):
        run = run if isinstance(run, Ran) else saved(tmp_path / name, *run)
        found = judge(run, lambda: right, lambda: right, within)
        kind = "silent" if facts else "no effect here"
        assert (found["kind"], found["facts"]) == (kind, facts or {}), name


def test_more_lines_than_the_whole_script_prints(tmp_path):
    twice = judged(ran(tmp_path, times=2), tmp_path)
    assert twice["kind"] == "no effect here"
    assert twice["facts"] == {"times": {"train": [4, 2]}}
    assert "4 `train` lines instead of 2" in twice["text"]
    assert judged(ran(tmp_path), tmp_path)["text"] == ""
