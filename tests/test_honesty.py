"""What the harness claims, on simulated samples."""

import sys

import made_up
import numpy as np
import pandas as pd
import pytest
from made_up import simulated
from support import full, wait_until

from bench import cases, stats
from bench.host import Gpu, Host
from bench.records import dropped, fault
from bench.run import conditions
from bench.show import summary, table
from bench.show.claims import verdict

PLAIN, AGAIN = cases.PLAIN, cases.AGAIN
DDP = "mnmc_ddp_launch.py x1"
EQUAL = dict.fromkeys([PLAIN, AGAIN, DDP, *(f"case {k}" for k in range(9))], 1000.0)  # images/s


def claims(known: list[dict]) -> dict[tuple, str]:
    """What a table claims, by case and column."""
    rows = summary.by_case(known)
    found = {(row["case"], key): row[key] for row in rows for key in ("claim", "ddp_claim")}
    return {which: word for which, word in found.items() if word}


def wrong(words) -> bool:
    """Whether a table of equal cases claims anything."""
    return bool({"faster", "slower"} & set(words))


@pytest.mark.full
def test_tables_of_equal_cases_claim_nothing():
    """200 runs of ten equal cases and the control, records and all: 95 in 100 claim nothing.

    With heavy tails, jumps and drift, which Student's t does not assume.
    """
    false = 0
    for number in range(200):
        words = claims(simulated(EQUAL, 10, f"rough {number}", 0.036, rough=True))
        assert len(words) == 10 + 9
        false += wrong(words.values())
    print(f"{false} of 200 tables claim something")
    assert false <= 10


@pytest.mark.parametrize("blocks", [6, *full(20)])
def test_the_share_of_wrong_tables_is_at_most_one_in_20(blocks):
    """More exactly, by 2,000 tables of log-ratios, which stop nowhere near the records."""
    dice, false = np.random.default_rng(blocks), 0
    for _ in range(2000):
        logs = dice.normal(0, 0.05, (12, blocks))
        ratios = [case - logs[0] for case in logs[1:]] + [case - logs[2] for case in logs[3:]]
        found = [stats.interval(ratio, len(ratios)) for ratio in ratios]
        false += wrong(stats.claim(ratio, found[0]) for ratio in found[1:])
    print(f"{blocks} blocks: {false / 2000:.1%} of the tables claim something")
    assert false <= 100


@pytest.mark.full
def test_what_is_slower_is_found_the_more_often_the_slower_it_is():
    """The curve of a default run's power, with 3.6% between starts; never with the wrong sign."""
    found = {}
    for by in (0.02, 0.05, 0.10, 0.15):
        words = []
        for number in range(60):
            known = simulated(EQUAL | {"case 0": 1000 * (1 - by)}, 10, f"{by} {number}", 0.036)
            words += [word for (name, _), word in claims(known).items() if name == "case 0"]
        assert "faster" not in words
        found[by] = words.count("slower") / len(words)
    print("found:", {f"{by:.0%}": f"{share:.0%}" for by, share in found.items()})
    assert [*found.values()] == sorted(found.values())
    assert found[0.15] >= 0.9 and found[0.02] < 0.1


def test_the_smallest_difference_that_a_run_finds_is_the_one_that_it_says():
    """What stats.smallest says of one run, planted in others, is found in nine of ten."""
    dice, claims = np.random.default_rng(0), 19
    pilot = dice.normal(0, 0.04, 10)
    away = np.log(1 - stats.smallest(pilot, claims))
    found = 0
    for logs in dice.normal(away, pilot.std(ddof=1), (2000, 10)):
        found += stats.claim(stats.interval(logs, claims), (1.0, 0.99, 1.01)) == "slower"
    assert 0.88 < found / 2000 < 0.92  # the standard deviation is 0.7%


def series(logs: dict[int, list[float]]) -> pd.Series:
    """Log-ratios by block, one a turn, as stats has them."""
    turns = [(block, round_) for block, values in logs.items() for round_ in range(len(values))]
    index = pd.MultiIndex.from_tuples(turns, names=["block", "round"])
    return pd.Series([x for values in logs.values() for x in values], index)


def test_starts_that_differ_widen_the_interval():
    """Turns of one start are not independent: more of them cannot narrow what starts decide."""
    logs = {1: [-0.376, -0.377], 2: [-0.202, -0.201], 3: [-0.219, -0.22], 4: [-0.396, -0.395]}
    values = stats.block_means(series(logs))
    assert stats.interval(values)[1:] == (None, None)  # too few starts for an interval
    logs |= {5: [-0.3, -0.3], 6: [-0.29, -0.28]}
    values = stats.block_means(series(logs))
    assert [*values] == pytest.approx([np.mean(turns) for turns in logs.values()])
    ratio, low, high = stats.interval(values)
    reach = 2.570582 * values.std() / 6**0.5  # t of 5 degrees of freedom
    assert (np.log(ratio), np.log(high / low) / 2) == pytest.approx((values.mean(), reach))
    many = stats.block_means(series({block: turns * 50 for block, turns in logs.items()}))
    assert stats.interval(many) == pytest.approx((ratio, low, high))


@pytest.mark.parametrize(
    ("ratio", "control", "word"),
    [
        ((1.10, 1.05, 1.15), (1.0, 0.99, 1.01), "faster"),
        ((1.01, 1.005, 1.02), (1.0, 0.99, 1.01), "no clear difference"),  # below 2%
        ((1.10, 0.99, 1.20), (1.0, 0.99, 1.01), "no clear difference"),  # the interval holds 1
        ((1.10, 1.05, 1.15), (1.0, 0.85, 1.12), "faster"),  # wide, but not off
        ((1.10, 1.05, 1.15), (1.002, 1.001, 1.003), "faster"),  # off, by next to nothing
        ((1.10, 1.05, 1.15), (1.05, 1.021, 1.08), "nothing claimed"),
        ((1.10, 1.05, 1.15), None, "nothing claimed"),
        (None, (1.0, 0.99, 1.01), None),
    ],
)
def test_a_claim_is_what_the_interval_and_the_control_allow(ratio, control, word):
    """The rule of docs/evidence/method.md."""
    assert stats.claim(ratio, control) == word


def test_fewer_than_six_blocks_show_ratios_and_claim_nothing():
    """However many turns there are, and however clear it looks."""
    rates = EQUAL | {"case 0": 500.0}
    few = {row["case"]: row for row in summary.by_case(simulated(rates, 5, 0, of_a_start=6))}
    assert few["case 0"]["ratio"] == pytest.approx(0.5, rel=0.2)
    assert few["case 0"]["ratio_low"] is few["case 0"]["ratio_high"] is None
    assert few["case 0"]["claim"] == few["case 0"]["ddp_claim"] == "nothing claimed"
    assert few["case 0"]["blocks"] == 5 and few["case 0"]["rounds"] == 30
    enough = {row["case"]: row for row in summary.by_case(simulated(rates, 6, 0))}
    assert enough["case 0"]["claim"] == enough["case 0"]["ddp_claim"] == "slower"
    assert enough[AGAIN]["ratio_low"] < 1 < enough[AGAIN]["ratio_high"]
    assert enough[AGAIN]["claim"] is None and enough[PLAIN]["ratio"] is None
    assert enough[DDP]["ddp_ratio"] is None


def test_a_failure_of_the_reference_keeps_what_was_measured_before_it():
    """Another case that fails has no speed."""
    known = simulated(EQUAL, 7, 0)
    known.append({"kind": "failure", "case": PLAIN, "block": 8, "reason": "out of memory"})
    known.append({"kind": "failure", "case": "case 1", "block": 8, "reason": "out of memory"})
    rows = {row["case"]: row for row in summary.by_case(known)}
    assert rows[PLAIN]["status"] == "ok" and rows["case 2"]["claim"] == "no clear difference"
    assert rows["case 1"]["status"] == "failed: out of memory" and not rows["case 1"]["ratio"]


def test_rounds_are_dropped_for_what_the_machine_did_never_for_the_result():
    """A stolen core, others' work, a throttled GPU; not an odd speed."""
    quiet = {"case": "a", "conditions": {"steal": 0.01, "foreign": 0.02}}
    assert fault(quiet) is None
    assert fault({"conditions": {"steal": 0.2}}) == "steal 20%"
    assert fault({"conditions": {"foreign": 0.5, "steal": 0.0}}) == "foreign 50%"
    assert fault({"conditions": {"gpu_throttled": True}}) == "GPU throttled"
    busy = {"case": "a", "conditions": {"steal": 0.5}}
    samples = [{**quiet, "round": k} for k in (1, 2, 3)] + [{**busy, "round": 3}]
    assert dropped(samples) == {3: "a: steal 50%"}
    samples += [{**busy, "round": 2}]  # most of them: then none
    assert dropped(samples) == {}


def test_a_gpu_is_watched_while_the_case_runs(monkeypatch):
    """The highest clock and temperature, and whether it was throttled at any look."""
    answers = [{"clock": 1530, "celsius": 61, "milliwatts": 250_100, "reasons": 0x4}]
    answers += [{"clock": 900, "celsius": 84, "milliwatts": 200_000, "reasons": 0x40}]
    monkeypatch.setattr(conditions, "PERIOD", 0.01)
    host = Host("C", 2, gpus=(Gpu("Tesla V100-SXM2-16GB", uuid="GPU-1"),))

    def seen(*answers: dict) -> dict:
        monkeypatch.setitem(sys.modules, "pynvml", nvml := made_up.nvml(["GPU-1"], *answers))
        with conditions.Watch(host) as watch:
            wait_until(lambda: len(nvml.looks) >= 4)
        return watch.seen(0.5)

    found = seen(*answers, {"clock": 900, "celsius": 84})
    assert (found["gpu_clock_mhz"], found["gpu_celsius"]) == (1530, 84)
    assert found["gpu_watts"] == 250.1
    assert found["gpu_throttled"] is True and fault({"conditions": found})
    assert 0 <= found["steal"] <= 1 and found["pressure"] >= 0
    assert seen(answers[0])["gpu_throttled"] is False  # the power cap is no fault


def test_mfu_follows_from_the_speed():
    """1,000 images/s of 15.7 GFLOPs each are all that a V100 can do in fp32."""
    known = simulated({PLAIN: 1000, AGAIN: 1000}, 5, 0)
    known[0]["environment"]["gpus"] = ["Tesla V100-SXM2-16GB"]
    known[0]["flops_per_image"] = 15.7e9
    row = summary.by_case(known)[0]
    assert row["mfu"] == pytest.approx(row["images_per_second"] / 1000)


def test_a_dropped_round_counts_in_neither_number_and_both_tables_are_kept(tmp_path):
    """table.md without it, table-all.md with it."""
    import json

    known = simulated({PLAIN: 1000, AGAIN: 1000, "equal": 1000}, 9, 0)
    known[-1]["conditions"] = {"steal": 0.5}
    text = "".join(json.dumps(record) + "\n" for record in known)
    (tmp_path / "records.jsonl").write_text(text)
    table.write(summary.Run.of(tmp_path))
    notes = (tmp_path / "table.md").read_text().splitlines()
    assert any("1 of 18 rounds left out" in line and "steal 50%" in line for line in notes)
    for name, rounds in (("table", 17), ("table-all", 18)):
        frame = pd.read_csv(tmp_path / f"{name}.csv")
        assert set(frame["rounds"]) == {rounds} and set(frame["blocks"]) == {9}


def told(*rows: dict, reach: float = 0.02) -> str:
    """The verdict on such rows, beside the plain script and a control with this interval."""
    about = dict.fromkeys(summary.COLUMNS) | {"status": "ok", "share": 1, "blocks": 20}
    again = {"case": AGAIN, "ratio": 1.0, "ratio_low": 1 - reach, "ratio_high": 1 + reach}
    return verdict([about | row for row in ({"case": PLAIN}, again, *rows)])


def test_the_verdict_claims_what_the_rows_claim_and_names_what_is_missing():
    """In three sentences at most; a noisy control is said first."""
    rows = [{"case": "a", "ratio": 0.9, "claim": "slower"}]
    rows.append({"case": "b", "ddp_ratio": 1.2, "ddp_claim": "faster"})
    rows += [{"case": "c", "ratio": 1.3, "claim": "no clear difference"}]
    rows += [{"case": "d", "status": "failed the gate: wrong numbers", "claim": "slower"}]
    text = told(*rows)
    assert text == (
        "The control, a repeat of snsc.py, has the ratio 1.000 [0.980, 1.020]. "
        "Slower than snsc.py: a by 10%; "
        "faster than mnmc_ddp_launch.py with as many processes: b by 20%. Not measured: d."
    )
    assert told(rows[2], reach=0.12) == (
        "A noisy run: the control's interval reaches 12% away from 1. "
        "No case is claimed to be slower or faster."
    )
