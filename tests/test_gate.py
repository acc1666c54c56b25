"""The gate: planted mistakes that it must catch in each precision, and right scripts that pass."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from planted import PLANTED, excess, write_scripts
from support import ORACLE, forked, full, records, succeeded, world

from bench import cases, process
from bench.host import Gpu, Host
from bench.ladder import TIMED
from bench.run import gate

CPU = Host("C", 2)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), free_mib=80_000.0)
DDP = "mnmc_ddp_launch.py"
CASE = cases.Case("x2", DDP, "torchrun", 2)
V100 = Gpu("Tesla V100-SXM2-16GB", (7, 0))
# A small net, since a CPU computes fp16 a hundred times as slowly as fp32.
SMALL = ["--dataset", "fashion-mnist", "--device", "cpu", "--arch", "shufflenet_v2_x0_5"]
SMALL += ["--batch-size", 16, "--log-every", 1]
STEPS = {"fp32": 3, "bf16": 3, "fp16": 2}  # each is an epoch
# Without --full, and in half precision, only these: the smallest ones, a large one, and one that
# only evaluates wrongly.
FEW = ["learning rate 2% off", "no weight decay", "no zero_grad", "gradients summed"]
FEW += ["evaluation with each rank's averages"]


def probed(double: bool) -> None:
    """Runs in the oracle's process: --exact, which the probe takes from a script's flags."""
    from bench.run.probe import Probe

    Probe(exact=True, double=double).prepare()


def trained(folder, script: str, steps: int, *flags, double: bool = False) -> gate.Trained:
    """Two processes of a script, or the oracle of two."""
    folder.mkdir()
    flags = [*SMALL, *flags, "--epochs", steps, "--images", 24, gate.TEST_IMAGES]
    flags += ["--log-json", folder / "log.jsonl", "--save", folder / "weights"]
    if script == ORACLE:
        succeeded(forked(script, *flags, "--parts", 2, prepare=partial(probed, double)))
    else:
        succeeded(*world(2, script, *flags, "--exact", *["--double"] * double))
    return gate.Trained(records(folder / "log.jsonl"), folder)


class Runs:
    """What two processes trained in one precision: by the script as it is, and by each mistake."""

    def __init__(self, precision: str, folder, mistakes: list[str]):
        self.precision = precision
        script, how = TIMED[precision]
        self.case = cases.Case("x2", script.path, "torchrun", 2, technique=precision)
        steps = STEPS[precision]
        self.exact = trained(folder / "oracle", ORACLE, steps, "--precision", precision)
        self.mine = {}
        for name, path in write_scripts(folder, precision, mistakes).items():
            run = trained(folder / name, str(path), steps, *how.flags)
            self.mine[name] = gate.measure_pair(run, self.exact)[0]

    def judged(self, name: str) -> dict:
        return gate.judge(self.case, self.mine[name], self.exact, CPU)

    def excess(self, name: str, most: gate.Limits) -> float:
        """The largest of its distances, as a multiple of the limit."""
        return excess(self.judged(name), most)


@pytest.fixture(scope="module", params=["fp32", *full("bf16", "fp16")])
def runs(request, tmp_path_factory) -> Runs:
    every = request.param == "fp32" and request.config.option.full
    return Runs(request.param, tmp_path_factory.mktemp(request.param), [*PLANTED] if every else FEW)


def test_the_right_script_passes_and_every_mistake_is_caught(runs):
    """As a CPU's two processes are judged."""
    verdicts = {name: runs.judged(name) for name in runs.mine}
    for name, found in verdicts.items():
        print(runs.precision, name, found.get("update"), found.get("evaluation"), found["reason"])
    assert [name for name, found in verdicts.items() if found["passed"]] == ["right"]
    assert verdicts["right"]["update"] == [0, 0]
    assert all(
        found["reason"].startswith("wrong numbers: ")
        for name, found in verdicts.items()
        if name != "right"
    )


# Gradients that are left over have been divided by fp16's scale already: little of them is added.
SMALLEST = {"fp16": {"no zero_grad"}}


def test_mistakes_are_ten_times_as_far_off_as_what_is_right(runs):
    """By the limits for one and two processes, and by those for more."""
    for most, hidden in ((gate.SAME, {}), (gate.OTHER[runs.precision], SMALLEST)):
        wrong = {name: runs.excess(name, most) for name in runs.mine if name != "right"}
        for name in hidden.get(runs.precision, ()):
            assert wrong.pop(name) <= 1
        assert all(excess > 1 for excess in wrong.values()), wrong
        assert runs.excess("right", most) < min(wrong.values()) / 10


def test_even_the_limits_for_gpus_let_no_mistake_through_but_the_smallest(runs):
    """They have a margin, in which the smallest mistakes are not seen."""
    most = gate.GPU[runs.precision]
    wrong = {name: runs.excess(name, most) for name in runs.mine if name != "right"}
    hidden = {name for name, excess in wrong.items() if excess <= 1}
    small = {"no weight decay", "evaluation with each rank's averages"}
    assert hidden <= small | SMALLEST.get(runs.precision, set())


@pytest.mark.full
def test_another_memory_layout_is_equal_in_double_precision(tmp_path):
    """Other kernels round in other ways, which BatchNorm makes grow; here it starts from 1e-16."""
    right = trained(tmp_path / "oracle", ORACLE, 3, double=True)
    script = "techniques/channels_last.py"
    case = cases.Case("x2", script, "torchrun", 2, technique="channels_last")
    run = trained(tmp_path / "script", script, 3, double=True)
    found = gate.judge(case, *gate.measure_pair(run, right), CPU)
    print(found["distance"], found["update"], found["evaluation"])
    assert found["passed"] and max(found["update"]) < 1e-10, found["reason"]


LINES = [{"event": "start"}]
LINES += [{"event": "train", "loss": 2 - k / 10, "seconds": 1.0, "images": 8} for k in range(5)]
LINES += [{"event": "eval", "loss": 1.5, "accuracy": 0.5, "images": 101}] * 5
LINES += [{"event": "end", "seconds": 9.0, "peak_memory_mib": 1000.0}]
MOVED = {1: 0.0, 2: 0.1, 3: 0.2}  # the oracle's weights: before, after one step, after two


def kept(folder, numbers: dict, shape=(3,), name="weight"):
    """Weights as the probe writes them, all of one value."""
    folder.mkdir()
    for number, value in numbers.items():
        np.savez(folder / f"{number}.npz", **{name: np.full(shape, value), "running_mean": 7.0})
    return folder


def launched(command: list[str], env: dict, limit: float):
    """Instead of process.launch: the oracle, or a script that does the same."""
    *_, save = command
    oracle = any(word.endswith("oracle.py") for word in command)
    for number, value in (MOVED if oracle else {1: 0.1, 2: 0.2}).items():
        np.savez(Path(save).with_name(f"{number}.npz"), weight=np.full(3, value))
    return LINES


def test_every_job_of_eight_gpus_has_the_environment_of_its_case(monkeypatch):
    """One command of nn.DataParallel's at four world sizes: four jobs, each with its GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = []

    def launch(command, env, limit):
        seen.append((command, env))
        return launched(command, env, limit)

    monkeypatch.setattr(process, "launch", launch)
    host = replace(CPU, cores=64, gpus=(V100,) * 8)
    rows = [c for c in cases.cases(host, [1, 2, 4, 8]) if c.script in ("snmc_dp.py", DDP)]
    found = gate.train_cases(rows, ["--batch-size", "2048"], host, lambda line: None)
    for case in rows:
        record = gate.judge(case, *found[case.name], host)
        assert record["passed"], record["reason"]
    jobs = [(c, e) for c, e in seen if any(word.endswith("snmc_dp.py") for word in c)]
    visible = sorted(env["CUDA_VISIBLE_DEVICES"] for _, env in jobs)
    assert visible == ["0", "0,1", "0,1,2,3", "0,1,2,3,4,5,6,7"]
    for command, env in seen:
        assert env["CUBLAS_WORKSPACE_CONFIG"] and env["NVIDIA_TF32_OVERRIDE"] == "0"
        place = command.index("--images")
        assert command[place + 1 : place + 3] == ["3072", "101"] and "--exact" in command
    parts = [c[c.index("--parts") + 1] for c, _ in seen if "--parts" in c]
    assert {*parts} == {"1", "2", "4", "8"}
    ddp = {env["OMP_NUM_THREADS"] for c, env in seen if any(word.endswith(DDP) for word in c)}
    assert ddp == {"64", "32", "16", "8"}


@pytest.mark.parametrize(
    "technique, expected",
    [("", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("channels_last", "fp32")],
)
def test_the_oracle_computes_in_the_cases_precision(technique, expected):
    """Apex's O1 is fp16 on a GPU, and fp32 on a CPU, where its amp is off."""
    case = cases.Case("x2", "techniques/amp.py", "torchrun", 2, technique=technique)
    for command, _ in gate.make_jobs(case, [], CPU):
        assert ("--double" in command) == (technique == "channels_last")
    assert command[command.index("--precision") + 1] == expected
    apex = cases.Case("x2", "mnmc_apex.py", "torchrun", 2)
    for host, precision in ((CPU, "fp32"), (replace(CPU, gpus=(V100,) * 2), "fp16")):
        command = gate.make_jobs(apex, [], host)[1][0]
        assert command[command.index("--precision") + 1] == precision


WRONG = {
    "saved no weights": {},
    "after step 1 weights are no numbers": {1: math.nan, 2: 0.2},
    "step 1 did not change the weights": {1: 0.0, 2: 0.2},
    "updates of the weights 2.0e-02 off": {1: 0.102, 2: 0.2},
}


@pytest.mark.parametrize("words", WRONG)
def test_weights_that_are_missing_or_wrong_have_a_reason_in_one_line(tmp_path, words):
    exact = gate.Trained(LINES, kept(tmp_path / "oracle", MOVED))
    mine = gate.Trained(LINES, kept(tmp_path / "mine", WRONG[words]))
    found = gate.judge(CASE, *gate.measure_pair(mine, exact), CPU)
    assert not found["passed"] and words in found["reason"] and "\n" not in found["reason"]


def test_files_that_are_not_the_models_weights_have_a_reason_in_one_line(tmp_path):
    """Cut short, of another shape, by DDP's names; and where the oracle itself learns nothing."""
    exact = gate.Trained(LINES, kept(tmp_path / "oracle", MOVED))
    cut = kept(tmp_path / "cut", {1: 0.1, 2: 0.2})
    (cut / "1.npz").write_bytes((cut / "1.npz").read_bytes()[:100])
    still = gate.Trained(LINES, kept(tmp_path / "still", dict.fromkeys(MOVED, 0.0)))
    other = "saved other weights than its model has"
    sides = {
        "cannot be read": (gate.Trained(LINES, cut), exact),
        other: (gate.Trained(LINES, kept(tmp_path / "shape", {1: 0.1, 2: 0.2}, (4,))), exact),
        f"{other} ": (
            gate.Trained(LINES, kept(tmp_path / "name", {1: 0.1}, name="module.w")),
            exact,
        ),
        "nothing to compare": (
            gate.Trained(LINES, kept(tmp_path / "fine", {1: 0.1, 2: 0.2})),
            still,
        ),
    }
    for words, pair in sides.items():
        found = gate.judge(CASE, *gate.measure_pair(*pair), CPU)
        assert not found["passed"] and words.strip() in found["reason"], found
        assert "\n" not in found["reason"]


def changed(event: str, **fields) -> list[dict]:
    """LINES, with this in the second record of an event."""
    place = [k for k, line in enumerate(LINES) if line["event"] == event][1]
    return [line | fields if k == place else line for k, line in enumerate(LINES)]


RECORDS = {
    "trained on 4 images, not 8": changed("train", images=4),
    "evaluated 202 images, not 101": changed("eval", images=202),
    "4 records of train, not 5": [line for k, line in enumerate(LINES) if k != 3],
    "a loss is no number": changed("train", loss=None),
    "losses of the evaluation 1.0e-03 off": changed("eval", loss=1.5015),
    "losses 5.3e-03 off": changed("train", loss=1.91),
    "evaluation 10 hits off": changed("eval", accuracy=0.4),
}


@pytest.mark.parametrize("words", RECORDS)
def test_records_that_are_wrong_have_a_reason_in_one_line(words):
    exact = gate.Trained(LINES, update=[])
    found = gate.judge(CASE, gate.Trained(RECORDS[words], update=[0.0, 0.0]), exact, CPU)
    assert not found["passed"] and f"wrong numbers: {words}" in found["reason"], found["reason"]
    json.dumps(found, allow_nan=False)


def test_more_processes_may_round_in_other_ways_but_not_in_the_first_step():
    """What grows from the order of a sum; a later step may be off, and must be numbers."""
    exact, four = gate.Trained(LINES), replace(CASE, world=4)
    late = [line | {"loss": 9.0} if k == 5 else line for k, line in enumerate(LINES)]
    mine = gate.Trained(late, update=[1e-6, 1e-2])
    assert gate.judge(four, mine, exact, CPU)["passed"]
    assert not gate.judge(CASE, mine, exact, CPU)["passed"]
    mine.update = [1e-4, 1e-2]
    assert not gate.judge(four, mine, exact, CPU)["passed"]


def test_a_run_that_failed_or_was_on_another_device_than_the_row_says_gets_no_speed():
    """A script that falls back to the CPU trains there and says nothing."""
    lines = [LINES[0] | {"device_name": "cpu"}, *LINES[1:]]
    mine, exact = gate.Trained(lines, update=[0.0, 0.0]), gate.Trained(LINES)
    assert gate.judge(CASE, mine, exact, CPU)["passed"]
    found = gate.judge(CASE, mine, exact, replace(CPU, gpus=(V100,)))
    assert not found["passed"] and "ran on cpu, but torch shows Tesla V100" in found["reason"]
    error = process.Failed("exit code 1: no memory")
    assert gate.judge(CASE, error, exact, CPU)["reason"] == "exit code 1: no memory"
    assert gate.judge(CASE, mine, error, CPU)["reason"].startswith("its oracle failed: exit code 1")


def test_shares_by_speed_are_compared_as_equal_ones():
    """As many as there are processes, of the case's batch; and the oracle cuts batches so."""
    (case,) = (c for c in cases.techniques(CPU, 4, ["exactness"]) if c.technique == "heterogeneous")
    mine, exact = gate.make_jobs(replace(case, batch=64), ["--data", "data"], CPU)
    assert "--shares" not in case.flags
    assert mine[0][mine[0].index("--shares") + 1] == "16,16,16,16"
    assert exact[0][exact[0].index("--split") + 1] == "contiguous"


def test_the_extra_images_leave_a_batch_for_all_ranks():
    """With the smallest default batch: a gate's epoch has one and a half batches."""
    (case,) = (c for c in cases.techniques(CPU, 2, ["exactness"]) if c.technique == "uneven inputs")
    (mine, _), _ = gate.make_jobs(replace(case, batch=2 * cases.SMALL), [], CPU)
    images, extra, batch = (
        int(mine[mine.index(flag) + 1]) for flag in ("--images", "--extra-images", "--batch-size")
    )
    assert images - extra >= batch


@pytest.mark.parametrize(
    ("gpus", "peak", "most"),
    [
        ((H100,), 1_000, 4),
        ((H100,), 10_000, 3),  # each may take 25,000 and a context
        ((H100,), 40_000, 1),
        ((H100, H100), 1_000, 1),  # each case has all of them
    ],
)
def test_as_many_gates_at_once_as_fit(gpus, peak, most):
    """By the memory of the first, which ran by itself."""
    host = Host("C", 16, gpus=gpus)
    assert gate.choose_number(first_gate(peak), {job(): 1}, host) == most
    assert gate.choose_number(process.Failed("it did not run"), {job(): 1}, host) == 1


def first_gate(peak: float) -> gate.Trained:
    """The gate of snsc.py, whose process took this many MiB."""
    return gate.Trained([{"event": "start"}, {"event": "end", "peak_memory_mib": peak}])


def job(*words: str) -> tuple:
    """A job as make_jobs makes it."""
    return ("python", *words), ()


@pytest.mark.parametrize(
    "jobs, free, most",
    [
        ({job("x"): 8}, 20_000, 2),  # of 10,000 MiB each
        ({job("x"): 8}, 19_999, 1),
        ({job("--double"): 1}, 5_100, 2),  # of 2,500
        ({job("--double"): 1}, 4_900, 1),
        ({job("x"): 8}, 100, 1),  # it may fit all the same
    ],
)
def test_gates_at_once_on_a_cpu_fit_into_its_memory(jobs, free, most, monkeypatch):
    monkeypatch.setattr(gate, "free_mib", lambda host: free)
    assert gate.choose_number(first_gate(1000), jobs, Host("C", 8)) == most


def test_a_gate_has_time_for_its_work(monkeypatch):
    """Photographs on eight cores: the oracle of eight ranks computes eight local batches."""
    clock, limits, threads = [0.0], {}, set()

    def launch(command, env, limit):
        clock[0] += 0 if threads else 200  # seconds of snsc.py, which is the first
        threads.add(env["OMP_NUM_THREADS"])
        if "--parts" in command:
            limits[command[command.index("--parts") + 1]] = limit
        return launched(command, env, limit)

    monkeypatch.setattr(process, "launch", launch)
    monkeypatch.setattr(gate.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gate, "free_mib", lambda host: 1e6)
    host = replace(CPU, cores=8)
    rows = [c for c in cases.cases(host, [1, 2, 4, 8]) if c.script in (cases.PLAIN, DDP)]
    rows = [replace(c, batch=64 * c.world) for c in rows if c.name != cases.AGAIN]
    gate.train_cases(rows, [], host, lambda line: None)
    assert limits["8"] > 8 * 200 and limits["1"] < limits["8"] / 4
    assert threads == {"1"}


def test_channels_last_is_gated_on_kernels_that_know_it():
    """On a GPU there are none for double precision; those for fp32 add up in another order."""
    (case,) = [c for c in cases.techniques(CPU, 1) if c.technique == "channels_last"]
    assert gate.arithmetic(case, CPU) == "double"
    host = Host("C", 2, gpus=(H100,))
    assert gate.arithmetic(case, host) == "layout"
    assert gate.limits(case, host) == gate.GPU["layout"]
    assert "--double" not in gate.make_jobs(case, [], host)[0][0]
