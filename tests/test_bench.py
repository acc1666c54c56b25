"""The benchmark: its table to the last digit, its command line, a run of the real scripts."""

import json
import sys
from dataclasses import replace
from itertools import pairwise

import pandas as pd
import pytest
from support import ROOT

from bench import cases, data, ladder, process, records
from bench.__main__ import main
from bench.host import Host
from bench.run import gate, schedule
from bench.show import summary, table
from bench.show.summary import Run, by_case

CPU = Host("C", 2)
PLAN = schedule.Plan("fashion-mnist", "data", 256, 4, "resnet18", 0, True, 60.0, 2)


def frame_of(known: list[dict]) -> pd.DataFrame:
    """The rows of a table, by case."""
    return pd.DataFrame(by_case(known), columns=summary.COLUMNS).set_index("case")


def test_gates_have_the_flags_of_what_is_timed_and_no_tf32(tmp_path, monkeypatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    plan, case = replace(PLAN, image_size=48), cases.Case(cases.PLAIN, "snsc.py", "python", 1)
    runner = schedule.Runner(plan, [case], tmp_path, CPU, print)
    runner.data_flag = []
    timed, env = runner.started(case, [])
    jobs = gate.make_jobs(case, plan.flags(), CPU)
    for command in (timed, *(command for command, _ in jobs)):
        assert [x for word, x in pairwise(command) if word == "--image-size"] == ["48"]
    overrides = [dict(pairs).get("NVIDIA_TF32_OVERRIDE") for _, pairs in jobs]
    assert overrides == ["0", "0"] and "NVIDIA_TF32_OVERRIDE" not in env


def fixture(folder):
    """Records written by hand: six rounds, one case twice as fast, one skipped, one failed."""
    rows = [
        cases.Case(cases.PLAIN, "snsc.py", "python", 1),
        cases.Case(cases.AGAIN, "snsc.py", "python", 1),
        cases.Case("slow x1", "slow.py", "torchrun", 1),
        cases.Case("fast x2", "fast.py", "torchrun", 2),
        cases.Case("slurm x2", "slurm.py", "srun", 2),
        cases.Case("broken x2", "broken.py", "torchrun", 2),
        cases.Case("one rank of 2 alone", "snsc.py", "python", 1, share=2),
    ]
    about = {"cpu": "C", "cores": 2, "gpus": []}
    setting = schedule.make_setting(PLAN, rows, "fixture", CPU, about)
    setting["environment"]["versions"] = {"torch": "2.15.0"}
    for row in setting["cases"]:
        row["threads"], row["backend"] = 2 // row["world"], "a library"
    records.append(folder, "setting", **setting)
    records.append(folder, "skip", case="slurm x2", reason="srun not found: no Slurm here")
    for case in rows[:4]:
        records.append(folder, "gate", case=case.name, passed=True, distance=0.0, reason="")
    records.append(
        folder, "gate", case="broken x2", passed=False, distance=None, reason="exit code 1"
    )
    speeds = {
        cases.PLAIN: (100, 200, 100, 200, 100, 200),
        cases.AGAIN: (101, 198, 100, 200, 100, 200),
        "slow x1": (80, 158, 80, 158, 80, 158),
        "fast x2": (200, 410, 200, 410, 200, 410),
        "one rank of 2 alone": (125, 250, 125, 250, 125, 250),
    }
    for number in range(6):
        for name, values in speeds.items():
            window = {"images": 1000, "seconds": 1000 / values[number], "data_seconds": 0.5}
            windows = [{**window, "step": 5, "seconds": 99.0}, {**window, "step": 10}]
            quiet = {"steal": 0.0, "foreign": 0.01}
            records.append(
                folder,
                "sample",
                case=name,
                block=number + 1,
                round=number + 1,
                begin=1_700_000_000.0 + number,
                warm_up=5,
                windows=windows,
                conditions=quiet,
                start={"startup_seconds": 2.0 + number},
                end={"peak_memory_mib": 100.0 + number},
            )
    records.append(folder, "stop", reason="as many rounds as asked for")


def test_the_table_of_a_fixture_is_exact(tmp_path):
    """To the last digit: the means, the paired ratios, the shares, the reasons."""
    fixture(tmp_path)
    table.write(Run.of(tmp_path))
    assert (tmp_path / "table.md").read_text() == (
        ROOT / "tests" / "golden" / "table.md"
    ).read_text()
    frame = frame_of(records.read(tmp_path)[0])
    assert frame.loc[cases.PLAIN, "images_per_second"] == pytest.approx((100 * 200) ** 0.5)
    assert frame.loc["fast x2", "ratio"] == pytest.approx((2 * 2.05) ** 0.5)
    assert frame.loc["fast x2", "data_share"] == pytest.approx(1 / (5 + 1000 / 410))
    assert frame.loc["fast x2", "overhead_share"] == pytest.approx(1 - (1.6 * 1.64) ** 0.5 / 2)
    assert frame.loc["fast x2", "window_p50_ms"] == pytest.approx((1000 + 1000 / 2.05) / 2)
    assert frame.loc["fast x2", "window_steps"] == 5
    assert frame.loc["slow x1", "claim"] == "slower"


def test_what_ranks_send_and_how_long_they_wait():
    """The median ignores a window in which another program sent a lot. Warm-ups do not count."""
    turn = {"memory_mib": 3000.0, "conditions": {"wall": 2.0, "cpu_seconds": 3.0}, "warm_up": 5}
    turn |= {"kind": "sample", "case": "x2", "block": 1, "round": 1}
    sizes = {5: 2**40, 10: 5 * 85 * 2**20, 15: 2**40, 16: 85 * 2**20}  # by the window's last step
    turn["windows"] = [{"step": step, "loopback_bytes": size} for step, size in sizes.items()]
    turns = [turn | {"largest_mib": 1500.0}, turn | {"largest_mib": 1400.0}]
    case, seen = {"world": 2, "threads": 1}, summary.windows(turns)
    found = summary.between_ranks(turns, seen, case)
    assert found == {"largest_mib": 1500.0, "sent_mib": 85.0, "idle": 0.25}
    started = [turn | {"end": {}} for turn in turns]  # by --fresh, with a start in its seconds
    assert summary.between_ranks(started, seen, case)["idle"] is None


@pytest.mark.parametrize("end", ["exit 0", "exit 1"])
def test_cifar10_is_fetched_whole_or_not_at_all(end, tmp_path, monkeypatch):
    """By a stand-in for the Python that downloads it."""
    folder, python = tmp_path / "data", tmp_path / "python"
    folder.mkdir()
    python.write_text(f'#!/bin/sh\nmkdir "$3/{data.UNPACKED}"\n{end}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert data.fetch_cifar10(folder) == (end == "exit 0")
    assert [path.name for path in folder.iterdir()] == [data.UNPACKED] * (end == "exit 0")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("dance", "dance"),
        ("run --flag", "--flag"),
        ("run --only nothing", "--only nothing"),
        ("run --budget nan", "--budget"),
        ("run --data /nowhere", "--data /nowhere"),
        ("run --out /proc/none", "--out /proc/none"),
        ("run --scaling strong --batch-size 2 --world 2", "two images for each"),
        ("run --techniques memory,speed", "--techniques speed: choose from kernels,memory"),
        ("run --resume /nowhere", "/nowhere"),
        ("table FOLDER", "records.jsonl"),
        ("compare /nowhere /nowhere", "/nowhere"),
        ("effects loss --out FOLDER", "choose from losses, invariant"),
        ("plan --gpus 8 --memory 80", "--params"),
        ("suite --minutes 8 --photos /no --out FOLDER", "--photos /no: there is"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, named, tmp_path, capsys):
    """The line names the flag or the folder. This one holds another program's records."""
    (tmp_path / records.NAME).write_text('{"kind": "other"}\n')
    with pytest.raises(SystemExit) as ended:
        main(command.replace("FOLDER", str(tmp_path)).split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(said.splitlines()) == 1 and named in said


@pytest.mark.full
def test_a_whole_quick_run_of_the_real_scripts(tmp_path):
    """One round: a row for all seven scripts, the gate passed by all that can run here."""
    out = tmp_path / "out"
    flags = ["--quick", "--blocks", "1", "--world", "2", "--dataset", "fashion-mnist"]
    flags += ["--arch", "shufflenet_v2_x0_5", "--batch-size", "32", "--out", str(out)]
    command = [sys.executable, "-m", "bench", "run", *flags]
    done = process.run(command, 540, process.environment())
    assert done.code == 0, done.err
    known = records.read(out)[0]
    gates = {record["case"]: record for record in records.of(known, "gate")}
    for name in (cases.PLAIN, "mnmc_ddp_mp.py x2"):  # which does not spawn, and which does
        assert gates[name]["update"] == [0, 0] and len(gates[name]["losses"]) == gate.STEPS
        assert gates[name]["evaluation"]["images"] == 101
    frame = frame_of(known)
    assert set(frame["script"]) == {script.path for script in ladder.LADDER}
    measured = frame[frame["status"] == "ok"].set_index("script")
    assert {"snsc.py", "mnmc_ddp_launch.py", "mnmc_ddp_mp.py"} <= set(measured.index)
    assert set(measured["threads"]) == {1} and measured.loc["mnmc_ddp_mp.py", "devices"] == 2
    assert (measured["images_per_second"] > 0).all() and (measured["distance"] <= 1e-5).all()
    assert frame[frame["status"] != "ok"]["status"].str.startswith("skipped: ").all()
    for name in ("table.md", "table.csv", "throughput.png", "ratios.png", "report.html"):
        assert (out / name).stat().st_size > 0
    assert json.loads((out / records.NAME).read_text().splitlines()[-1])["kind"] == "stop"
