"""The gate: planted mistakes that it must catch in each precision, and right scripts that pass."""

import json
import math
from dataclasses import replace
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
# Without --full only these: the smallest ones, a large one, and one that only evaluates wrongly.
FEW = ["learning rate 2% off", "no weight decay", "no zero_grad", "gradients summed"]
FEW += ["evaluation with each rank's averages"]


def probed() -> None:
    """Runs in the oracle's process: --exact, which the probe takes from a script's flags."""
    from bench.run.probe import Probe

    Probe(exact=True, double=False).prepare()


def trained(folder, script: str, steps: int, *flags) -> gate.Trained:
    """Two processes of a script, or the oracle of two."""
    folder.mkdir()
    flags = [*SMALL, *flags, "--epochs", steps, "--images", 24, gate.TEST_IMAGES]
    flags += ["--log-json", folder / "log.jsonl", "--save", folder / "weights"]
    if script == ORACLE:
        succeeded(forked(script, *flags, "--parts", 2, prepare=probed))
    else:
        succeeded(*world(2, script, *flags, "--exact"))
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
    mistakes = [*PLANTED] if request.config.option.full else FEW
    mistakes = mistakes if request.param == "fp32" else FEW[:2]
    return Runs(request.param, tmp_path_factory.mktemp(request.param), mistakes)


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


def test_mistakes_are_ten_times_as_far_off_as_what_is_right(runs):
    """By the limits for one and two processes, and by those for more. Those for GPUs have a margin,
    in which the smallest mistakes are not seen.
    """
    for most in (gate.SAME, gate.OTHER[runs.precision]):
        wrong = {name: runs.excess(name, most) for name in runs.mine if name != "right"}
        assert all(excess > 1 for excess in wrong.values()), wrong
        assert runs.excess("right", most) < min(wrong.values()) / 10
    seen = {name for name in runs.mine if runs.excess(name, gate.GPU[runs.precision]) > 1}
    small = {"no weight decay", "evaluation with each rank's averages"}
    assert runs.mine.keys() - seen <= small | {"right"}


LINES = [{"event": "start"}]
LINES += [{"event": "train", "loss": 2 - k / 10, "seconds": 1.0, "images": 8} for k in range(5)]
LINES += [{"event": "eval", "loss": 1.5, "accuracy": 0.5, "images": 101}] * 5
LINES += [{"event": "end", "seconds": 9.0, "peak_memory_mib": 1000.0}]
MOVED = {1: 0.0, 2: 0.1, 3: 0.2}  # the oracle's weights: before, after one step, after two


def kept(folder, numbers: dict, name="weight"):
    """Weights as the probe writes them, all of one value."""
    folder.mkdir()
    for number, value in numbers.items():
        np.savez(folder / f"{number}.npz", **{name: np.full(3, value), "running_mean": 7.0})
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
    ("script", "technique", "gpu", "flags"),
    [
        ("techniques/amp.py", "bf16", None, "--precision bf16"),
        ("mnmc_apex.py", "", None, "--precision fp32"),  # its amp is off
        ("mnmc_apex.py", "", V100, "--precision fp16"),
        ("techniques/channels_last.py", "channels_last", None, "--precision fp32 --double"),
        # There are no such kernels for double precision; those for fp32 add up in another order.
        ("techniques/channels_last.py", "channels_last", H100, "--precision fp32"),
    ],
)
def test_the_oracle_computes_in_the_cases_precision(script, technique, gpu, flags):
    case = cases.Case("x2", script, "torchrun", 2, technique=technique)
    host = replace(CPU, gpus=(gpu,) * 2 if gpu else ())
    mine, exact = (" ".join(words) for words, _ in gate.make_jobs(case, [], host))
    double = "--double" in flags
    assert flags.split(" --double")[0] in exact
    assert ("--double" in mine, "--double" in exact) == (double, double)


WRONG = {
    "saved no weights": {},
    "after step 1 weights are no numbers": {1: math.nan, 2: 0.2},
    "step 1 did not change the weights": {1: 0.0, 2: 0.2},
    "updates of the weights 2.0e-02 off": {1: 0.102, 2: 0.2},
}


@pytest.mark.parametrize("words", [*WRONG, "cannot be read", "other weights than its model has"])
def test_weights_that_are_missing_or_wrong_have_a_reason_in_one_line(tmp_path, words):
    """Also a file that was cut short, and DDP's names."""
    exact = gate.Trained(LINES, kept(tmp_path / "oracle", MOVED))
    other = {"name": "module.weight"} if "other" in words else {}
    folder = kept(tmp_path / "mine", WRONG.get(words, {1: 0.1, 2: 0.2}), **other)
    if words == "cannot be read":
        (folder / "1.npz").write_bytes((folder / "1.npz").read_bytes()[:100])
    found = gate.judge(CASE, *gate.measure_pair(gate.Trained(LINES, folder), exact), CPU)
    assert not found["passed"] and words in found["reason"] and "\n" not in found["reason"]


def changed(event: str, **fields) -> list[dict]:
    """LINES, with this in the second record of an event."""
    place = [k for k, line in enumerate(LINES) if line["event"] == event][1]
    return [line | fields if k == place else line for k, line in enumerate(LINES)]


RECORDS = {
    "trained on 4 images, not 8": changed("train", images=4),
    "4 records of train, not 5": [line for k, line in enumerate(LINES) if k != 3],
    "a loss is no number": changed("train", loss=None),
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


@pytest.mark.parametrize(
    ("cores", "gpus", "peak", "most"),
    [
        (16, (H100,), 10_000, 3),  # each may take 25,000 and a context
        (16, (H100,), 500, 6),  # all of a ladder's, on one GPU
        (16, (H100, H100), 1_000, 1),  # each case has all of them
        (8, (), 1_000, 2),  # of 10,000 MiB each, for eight processes
    ],
)
def test_as_many_gates_at_once_as_fit(cores, gpus, peak, most, monkeypatch):
    """By the memory of the first, which ran by itself."""
    first = gate.Trained([{"event": "start"}, {"event": "end", "peak_memory_mib": peak}])
    jobs = {(("python", "x"), ()): 1 if gpus else 8}
    if not gpus:
        monkeypatch.setattr(gate, "free_mib", lambda host: 20_000)
    assert gate.choose_number(first, jobs, Host("C", cores, gpus=gpus)) == most
    failed = process.Failed("it did not run")
    assert gate.choose_number(failed, jobs, Host("C", cores, gpus=gpus)) == 1
