"""`bench loader` and bench.experiments.recipe: how fast imagenet.py loads, and trains."""

import json
import sys

import pytest
from support import write_photos

from bench.experiments import loader
from bench.process import run
from bench.show.claims import span

pytestmark = pytest.mark.full


def measure(*flags):
    return run([sys.executable, "-m", "bench", "loader", *flags], 300)


def test_every_contender_takes_its_turns(tmp_path):
    """On a few pictures: each has a record of each turn."""
    out = tmp_path / "found.jsonl"
    flags = ["--data", write_photos(tmp_path / "photos"), "--image-size", 32, "--workers", 2]
    done = measure(*flags, "--starts", 1, "--turns", 2, "--seconds", 0.2, "--out", out)
    assert done.code == 0, done.err
    found = [json.loads(line) for line in out.read_text().splitlines()]
    names = {loader.DECODE, loader.ITEMS, loader.OURS, loader.PILLOW}
    assert {r["name"] for r in found} == names
    assert sorted((r["start"], r["turn"]) for r in found) == sorted(
        [(1, turn) for turn in (1, 2) for _ in names]
    )
    assert all(r["images_per_second"] > 0 for r in found)


def test_ratios():
    """Of made-up speeds."""
    speeds = {loader.DECODE: 400, loader.OURS: 200, loader.PILLOW: 100}
    found = [
        {"name": name, "start": start, "turn": turn, "images_per_second": speed * (1 + start / 10)}
        for name, speed in speeds.items()
        for start in range(6)
        for turn in range(2)
    ]
    rows = {row["name"]: row for row in loader.analysed(found)}
    assert [*rows] == [loader.DECODE, loader.OURS, loader.PILLOW]
    assert rows[loader.OURS]["of_decoding"] == pytest.approx((0.5, 0.5, 0.5))
    assert span(*rows[loader.OURS]["of_pillow"], digits=2) == "2.00 [2.00, 2.00]"


def test_the_loader_and_the_training_by_themselves(tmp_path):
    """A line for each call, appended; imagenet.py's flags are its own."""
    out = tmp_path / "speed.jsonl"
    flags = ["--data", write_photos(tmp_path / "photos"), "--arch", "mobilenet_v3_small"]
    flags += ["--image-size", 32, "--batch-size", 12, "--device", "cpu", "--workers", 1]
    command = [sys.executable, "-m", "bench.experiments.recipe", "--record", out, "--seconds", 0.2]
    out.write_text('{"precision": "bf16"}\n')
    done = run([*command, *flags, "--precision", "fp32"], 300)
    assert done.code == 0, done.err
    before, line = [json.loads(line) for line in out.read_text().splitlines()]
    assert (before["precision"], line["precision"]) == ("bf16", "fp32")
    assert line["loader"] > 0 and line["device"] > 0
    assert (line["device_name"], line["world_size"], line["classes"]) == ("cpu", 1, 3)
    assert line["limit"] == ("the loader", "the device")[line["loader"] > line["device"]]
