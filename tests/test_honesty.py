"""What the harness claims, on simulated samples; and planted mistakes that its gate must catch."""

import os
import random
import re
import time

import pytest
from simulated import HOST, PLAN, simulated
from support import ORACLE, ROOT, forked, records, succeeded, world

from bench import cases
from bench.flops import flops
from bench.host import Gpu, Host
from bench.measure import conditions, gate, schedule
from bench.results import table
from bench.results.records import dropped, fault
from bench.results.stats import (
    median_interval,
    pairs,
    ranks,
    ratio_interval,
    resampled_medians,
    together,
    verdict,
)

PLAIN, AGAIN = cases.PLAIN, cases.AGAIN


def test_a_planted_slowdown_of_5_percent_is_found():
    """With the right sign every time, in an interval that covers it 19 times in 20.

    As often the control excludes 1 by chance, and then nothing is claimed.
    """
    covered, words = 0, []
    for seed in range(40):
        rates = {PLAIN: 1000, AGAIN: 1000, "slow": 1000 / 1.05}
        frame = table.tidy(simulated(rates, 30, seed)).set_index("case")
        words.append(frame.loc["slow", "verdict"])
        assert frame.loc["slow", "ratio_high"] < 1
        if words[-1] == "slower":
            assert frame.loc["slow", "rank"] == 2 and frame.loc[PLAIN, "rank"] == 1
        covered += frame.loc["slow", "ratio_low"] <= 1 / 1.05 <= frame.loc["slow", "ratio_high"]
    assert covered >= 36  # 38 expected, standard deviation 1.4
    assert set(words) <= {"slower", "too noisy"} and words.count("slower") >= 36


def test_equal_cases_are_tied_at_least_19_times_in_20():
    """Whatever the machine did meanwhile; and in no case is one of them called faster."""
    words = []
    for seed in range(100):
        rates = {PLAIN: 1000, AGAIN: 1000, "equal": 1000}
        words.append(table.tidy(simulated(rates, 15, seed)).set_index("case").verdict["equal"])
    assert words.count("tie") >= 95
    assert set(words) <= {"tie", "too noisy"}, words  # noisy: the control alone excluded 1


def test_every_pair_is_ranked_or_tied_and_ties_share_a_rank():
    """Three speeds, two of them within noise."""
    values = {"a": 100.0, "b": 100.5, "c": 80.0}
    speeds = {name: {k: rate * (1 + 0.01 * k) for k in range(9)} for name, rate in values.items()}
    control = (1.0, 0.99, 1.01)
    assert ranks(speeds, control) == {"a": 1, "b": 1, "c": 3}
    assert pairs(speeds, control)["c", "a"] == "slower"
    assert ranks(speeds, (1.05, 1.02, 1.08)) == {}  # too noisy to rank


@pytest.mark.parametrize("n", [3, 4, 15, 40])
def test_the_medians_of_resamples_are_those_of_resampling(n):
    """The quick draw of a middle has the distribution of the textbook's slow one."""
    import numpy as np

    dice = np.random.default_rng(1)
    values = dice.normal(size=n)
    slow = np.median(values[dice.integers(n, size=(20_000, n))], axis=1)
    quick = resampled_medians(values)
    for q in (2.5, 16, 50, 84, 97.5):
        assert np.mean(quick <= np.percentile(slow, q)) == pytest.approx(
            np.mean(slow <= np.percentile(slow, q)), abs=0.02
        )
    assert median_interval(values) == median_interval(values)


def test_rounds_are_dropped_for_what_the_machine_did_never_for_the_result():
    """A stolen core, others' work, a throttled GPU; not an odd speed."""
    quiet = {"case": "a", "conditions": {"steal": 0.01, "foreign": 0.02}}
    assert fault(quiet) is None and fault({"case": "a"}) is None
    assert fault({"conditions": {"steal": 0.2}}) == "steal 20%"
    assert fault({"conditions": {"foreign": 0.5, "steal": 0.0}}) == "foreign 50%"
    assert fault({"conditions": {"gpu_throttled": True}}) == "GPU throttled"
    busy = {"case": "a", "conditions": {"steal": 0.5}}
    samples = [{**quiet, "round": k} for k in (1, 2, 3)] + [{**busy, "round": 3}]
    assert dropped(samples) == {3: "a: steal 50%"}
    samples += [{**busy, "round": 2}]  # most of them: then none
    assert dropped(samples) == {}


def test_a_gpu_is_watched_while_the_case_runs(tmp_path, monkeypatch):
    """The highest clock and temperature, and whether it was throttled in any second."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '1530, 61, 250.1, 0x0000000000000004'\n"
        "echo '900, 84, 200.0, 0x0000000000000040'\necho '900, 84, [N/A], [N/A]'\n"
        'case "$*" in *"-l 1") exec sleep 60; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    host = Host("C", 2, gpus=(Gpu("Tesla V100-SXM2-16GB"),))
    with conditions.Monitor(host) as monitor:
        with conditions.Watch(monitor) as watch:
            while not monitor.size() or time.monotonic() < watch.begin + 0.5:
                pass
        seen = watch.seen(0.5)
        with conditions.Watch(monitor) as later:
            pass
    assert "gpu_clock_mhz" not in later.seen(0.0)  # the lines of before are not its
    assert monitor.process.poll() is not None  # ended, not left behind
    assert (seen["gpu_clock_mhz"], seen["gpu_celsius"]) == (1530, 84)
    assert seen["gpu_throttled"] and fault({"conditions": seen})
    assert 0.4 < seen["wall"] < 5 and 0 <= seen["steal"] <= 1 and seen["pressure"] >= 0


def test_the_flops_of_a_model_are_those_that_are_known():
    """ResNet-18 at 224 pixels: 1.81 G multiply-adds forward (He et al., 2016, table 1: 1.8)."""
    forward = 1.814e9 * 2
    first = 2 * 112 * 112 * 64 * 3 * 49  # whose inputs, the images, need no gradient
    assert flops("resnet18", 224, 1000) == pytest.approx(3 * forward - first, rel=0.005)


def test_mfu_and_cost_follow_from_the_speed():
    """1,000 images/s of 15.7 GFLOPs each are all that a V100 can do in fp32."""
    known = simulated({PLAIN: 1000, AGAIN: 1000}, 5, 0)
    known[0]["environment"]["gpus"] = ["Tesla V100-SXM2-16GB"]
    known[0]["flops_per_image"] = 15.7e9
    known[0]["plan"]["price"] = 3.6
    row = table.tidy(known).set_index("case").loc[PLAIN]
    assert row["mfu"] == pytest.approx(row["images_per_second"] / 1000)
    assert row["cost_per_million"] == pytest.approx(1000 / row["images_per_second"])


def test_a_dropped_round_counts_in_neither_number_and_both_tables_are_kept(tmp_path):
    """table.md without it, table-all.md with it."""
    import json

    known = simulated({PLAIN: 1000, AGAIN: 1000, "equal": 1000}, 9, 0)
    known[-1]["conditions"] = {"steal": 0.5}
    text = "".join(json.dumps(record) + "\n" for record in known)
    (tmp_path / "records.jsonl").write_text(text)
    _, _, remarks = table.write(tmp_path)
    assert any("1 of 9 rounds are left out" in line and "steal 50%" in line for line in remarks)
    assert "8 rounds" in (tmp_path / "table.md").read_text()
    assert "9 rounds" in (tmp_path / "table-all.md").read_text()


# Mistakes that train, do not crash, and are no slower; each is in one of the ancestors' pages.
PLANTED = {
    "one rank's gradient is skipped": ("loss.backward()", "(loss * (rank == 0)).backward()"),
    "metrics are of one rank only": (
        "dist.all_reduce(meter.sums)",
        "meter.sums *= dist.get_world_size()",
    ),
    "the sampler's epoch is not set": ("sampler.set_epoch(epoch)", "pass"),
    "every rank draws the same augmentation": ("draws[index]", "draws[: len(images)]"),
}


def gate_losses(script: str, log, **env) -> list[float]:
    """The losses of the gate's steps: 2 processes of a script, or the oracle by itself."""
    flags = ["--dataset", "fashion-mnist", "--device", "cpu", "--batch-size", 32, "--log-every", 1]
    flags += ["--max-steps", gate.STEPS, "--log-json", log]
    if script == ORACLE:
        succeeded(forked(script, *flags, "--parts", 2))
    else:
        succeeded(*world(2, script, *flags, **env))
    return gate.losses(records(log))


def test_planted_mistakes_are_caught_by_the_gate(tmp_path):
    """And the script as it is passes."""
    exact = gate_losses(ORACLE, tmp_path / "oracle.jsonl")
    good = gate_losses("mnmc_ddp_launch.py", tmp_path / "good.jsonl")
    assert gate.differences(good, exact) == [0] * gate.STEPS
    source = (ROOT / "mnmc_ddp_launch.py").read_text()
    runner = schedule.Runner(PLAN, [], tmp_path, HOST, None)
    runner.note("setting")
    for name, (right, wrong) in PLANTED.items():
        assert re.search(re.escape(right), source)
        script = tmp_path / "planted.py"
        script.write_text(source.replace(right, wrong))
        losses = gate_losses(str(script), tmp_path / f"{name}.jsonl")
        mine, theirs = (
            [{"event": "train", "loss": loss, "seconds": 1.0} for loss in values]
            for values in (losses, exact)
        )
        for technique in ("", "compiled", "bf16", "fp16"):
            case = cases.Case(name, "planted.py", "torchrun", 2, technique=technique)
            runner.judge(case, mine, theirs)
            found = runner.known[-1]
            if technique == "fp16" and "gradient" in name:
                continue  # of fp16 only the first step can be compared, before any gradient counts
            assert not found["passed"] and "wrong numbers" in found["reason"], (name, technique)


def tables_with_a_claim(level: float) -> int:
    """Of 40 tables of 20 equal cases, those that call one faster or slower at this level."""
    found, dice = 0, random.Random(0)
    for _ in range(40):
        runs = [{k: dice.lognormvariate(0, 0.1) for k in range(20)} for _ in range(21)]
        plain, *equal = runs
        ratios = [ratio_interval(case, plain, level) for case in equal]
        found += any(verdict(ratio, (1, 0.99, 1.01), 20) != "tie" for ratio in ratios)
    return found


def test_the_verdicts_of_a_table_hold_together():
    """With 20 cases, intervals that hold 95 times in 100 each would give many a false one."""
    assert tables_with_a_claim(together(20)) <= 4
    assert tables_with_a_claim(0.95) > 10


def test_ratio_intervals_pair_by_round():
    """A slow round hits both sides and drops out; a round of one side alone does not count."""
    reference = {1: 100.0, 2: 10.0, 3: 1000.0}
    case = {1: 103.0, 2: 10.3, 3: 1030.0, 4: 5.0}
    assert ratio_interval(case, reference) == pytest.approx((1.03, 1.03, 1.03))
    assert ratio_interval({4: 1.0}, reference) is None
