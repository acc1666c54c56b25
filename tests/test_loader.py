"""bench.measure.loader: what is compared is really run, and the ratios are those of its records."""

import json
import sys
from argparse import Namespace

import pytest
from PIL import Image
from support import refused, write_photos

from bench.measure import loader
from bench.measure.process import run


def measure(*flags):
    return run([sys.executable, "-m", "bench.measure.loader", *flags], 300)


def test_every_contender_takes_its_turns(tmp_path, libraries):
    """On a few pictures: the table names each, and each has a record of each turn."""
    out = tmp_path / "found.jsonl"
    flags = ["--data", write_photos(tmp_path / "photos"), "--image-size", 32, "--workers", 2]
    done = measure(*flags, "--starts", 2, "--turns", 1, "--seconds", 0.2, "--out", out)
    assert done.code == 0, done.err
    found = [json.loads(line) for line in out.read_text().splitlines()]
    names = {loader.DECODE, loader.ITEMS, loader.OURS, loader.PILLOW, loader.DALI}
    assert {r["name"] for r in found} == names
    assert sorted((r["start"], r["turn"]) for r in found) == sorted(
        [(start, 1) for start in (1, 2) for _ in names]
    )
    assert all(r["images_per_second"] > 0 for r in found)


def test_ratios():
    """Of made-up speeds, twice and half as fast as the one that they are compared with."""
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
    assert loader.cell(rows[loader.OURS]["of_pillow"]) == "2.00 [2.00, 2.00]"


def test_enlarged_pictures(tmp_path):
    """So many, of the wanted size, in the folders of their classes."""
    data = write_photos(tmp_path / "photos")
    made = loader.enlarged(data, tmp_path / "large", 5, 120, 90)
    paths = [*(made / "train").glob("*/*.jpg")]
    assert len(paths) == 5 and {path.parent.name for path in paths} <= {"ant", "bee", "cat"}
    assert {Image.open(path).size for path in paths} == {(120, 90)}


@pytest.mark.parametrize("flags", [["--data", "/nowhere"], ["--enlarge", "500"]])
def test_bad_input(flags, tmp_path):
    refused(measure("--data", write_photos(tmp_path / "photos"), *flags), flags[0])


def test_the_cores_of_a_machine(monkeypatch):
    """srun gives each process its own; torchrun's share them."""
    import os
    import runpy

    from bench import ROOT

    count = runpy.run_path(str(ROOT / "imagenet.py"))["cores_of_all"]
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(12))
    assert count(Namespace(launcher="srun", local_size=4)) == 48
    assert count(Namespace(launcher="torchrun", local_size=4)) == 12
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert count(Namespace(launcher="srun", local_size=4)) == 64
