"""bench.measure.starts finds a difference between starts that is there, and none that is not."""

import json

import numpy as np
import pytest
from support import ROOT

from bench.measure import starts


def measured(spread: float, seed: int) -> list[dict]:
    """Records of 4 starts of 12 turns that differ by this much, 5% from turn to turn, on a machine
    that all find slower and slower."""
    dice = np.random.default_rng(seed)
    found = []
    for start in (1, 2, 3, 4):
        own = dice.normal(0, spread)
        for turn in range(1, 13):
            speed = 500 * np.exp(own + dice.normal(0, 0.05) - 0.1 * turn)
            about = {"case": "snsc.py", "environment": "the harness's", "start": start}
            found.append(about | {"turn": turn, "images_per_second": speed})
    return found


def test_a_spread_between_starts_is_told_from_that_of_turns():
    (row,) = starts.analysed(measured(0.1, 0))
    assert (row["starts"], row["turns"]) == (4, 12)
    assert row["between"] > 0.04 and row["of_turns"] == pytest.approx(0.05 / 12**0.5, rel=0.25)
    assert row["p"] < 1e-3


def test_where_starts_are_equal_that_is_seldom_said():
    """One time in a hundred at p < 0.01."""
    found = [starts.analysed(measured(0.0, seed))[0]["p"] for seed in range(200)]
    assert sum(p < 0.01 for p in found) <= 8 and np.mean(found) == pytest.approx(0.5, abs=0.1)


def test_the_table_in_the_docs_is_that_of_its_records():
    """Of each environment the two spreads and p, as docs/measuring.md has them."""
    records = ROOT / "logs" / "2-cores-epyc-torch2.15" / "starts" / "snsc.jsonl"
    rows = starts.analysed([json.loads(line) for line in records.read_text().splitlines()])
    assert len(rows) == len(starts.ENVIRONMENTS)
    text = (ROOT / "docs" / "measuring.md").read_text()
    for row in rows:
        assert f"| {row['between']:.1%} | {row['of_turns']:.1%} | {row['p']:.2g} |" in text, row
