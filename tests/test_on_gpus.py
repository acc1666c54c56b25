"""The scripts on GPUs: with -m gpu on this machine's, otherwise on two that torch pretends to have.

tests/pretend/sitecustomize.py says what pretended GPUs cannot show. `python -m bench suite scripts`
trains every script on real ones, and compares it with the oracle.
"""

import json
import re
import sys
from functools import cache, partial

import pytest
import real
from planted import PLANTED, SHARE_A_GPU, excess, write_scripts
from real import Trained, train
from support import (
    ORACLE,
    ROOT,
    Forked,
    forked,
    free_port,
    full,
    python,
    records,
    refused,
    succeeded,
    torchrun,
    world,
    write_idx,
)

from bench import backends, cases, ladder, process
from bench import host as hosts
from bench.__main__ import main
from bench.host import Host
from bench.run import gate

KINDS = ["pretended", pytest.param("real", marks=pytest.mark.gpu)]
PRETENDED = {"PYTHONPATH": str(ROOT / "tests" / "pretend"), "PRETEND_GPUS": "2"}
TWO_STEPS = ["--dataset", "fashion-mnist", "--images", 32, 20, "--batch-size", 16]
TWO_STEPS += ["--epochs", 1, "--log-every", 1, "--arch", real.ARCH, "--workers", 0]
# Flags, where the defaults are slow or leave out what is difficult.
RESNET = ["--arch", "resnet18", "--image-size", 16]  # FSDP is slow with many tensors
FURTHER = {
    "techniques/fsdp.py": RESNET,
    "techniques/hybrid_fsdp.py": RESNET,
    # bf16 needs no scaler, but a CPU computes fp16 slowly.
    "techniques/amp.py": ["--amp", "fp16", "--batch-size", 16, "--images", 64, 20],
    "techniques/comm_hooks.py": ["--hook", "powersgd"],
    "techniques/deepspeed_zero.py": ["--stage", "3"],
    "techniques/heterogeneous.py": ["--shares", "40,24"],
}
RUNS = [path for path, script in ladder.SCRIPTS.items() if script.pretended]
DEFAULT = ("snmc_dp.py", "mnmc_ddp_launch.py", "techniques/amp.py")  # without --full
ONE_PROCESS = [path for path, script in ladder.SCRIPTS.items() if not script.processes]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    """Real or pretended: the programs that a test starts find such GPUs."""
    Forked.start_server()  # it must not pretend
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pretended":
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            for name, value in PRETENDED.items():
                patch.setenv(name, value)
        yield request.param


@pytest.fixture(scope="module")
def host(kind) -> Host:
    """This machine with its GPUs."""
    found = hosts.look()
    assert found.gpus and not found.unusable
    return found


def two_gpus() -> None:
    """Runs in the script's process, which has imported torch already."""
    sys.path.insert(0, PRETENDED["PYTHONPATH"])
    import pretended

    pretended.pretend(2)


def old_gpus() -> None:
    """The same, and they are without bf16, such as V100s."""
    two_gpus()
    import torch

    torch.cuda.is_bf16_supported = lambda including_emulation=True: including_emulation


@cache
def run(script: str, *flags, **keywords) -> Trained:
    """A script with two devices, or with one if it can use only one."""
    given = [word for word in real.short() if word not in ("--device", "cpu")]
    given += ["--epochs", 1, "--workers", 0]  # four workers a rank would fill this machine
    if script in ladder.SCRIPTS and (arch := ladder.SCRIPTS[script].arch):
        given += ["--arch", arch]
    start = partial(world, 2)
    if script == "mnmc_ddp_mp.py":
        start, keywords = partial(python, **PRETENDED), {"CUDA_VISIBLE_DEVICES": "0,1"}
        given += ["--nproc-per-node", 2]
    elif script in (*ONE_PROCESS, ORACLE):
        start = forked
    elif script == "mnmc_ddp_slurm.py":
        start = partial(real.as_srun, 2)
    found = train(start, script, *given, *flags, **keywords)
    name = found.records[0]["device_name"]
    assert name == ("Pretended GPU" if keywords else "cpu")
    return found


def right(script: str, *more) -> Trained:
    """What the script must train: without GPUs what it trains itself, or what DDP does."""
    about = ladder.SCRIPTS[script]
    if script == "snmc_dp.py":
        return run(ORACLE, "--parts", 2, "--split", "contiguous")
    as_ddp = about.processes and about.equality == () and not more
    return run(ladder.DDP if as_ddp or script == "techniques/compile.py" else script, *more)


@pytest.mark.parametrize(
    "script", [*DEFAULT, *full(*(script for script in RUNS if script not in DEFAULT))]
)
def test_the_way_for_gpus_trains_the_same(script, request):
    """Pretended GPUs compute as the CPU does. If the numbers differ, it is the script's doing.

    nn.DataParallel gives each GPU half of the batch. So BatchNorm sees halves, and two means are
    averaged in another order. Nothing is compiled on pretended GPUs.
    """
    if (name := ladder.SCRIPTS[script].library) and not backends.installed(name):
        request.getfixturevalue("libraries")
    more = FURTHER.get(script, [])
    found = run(script, *more, prepare=two_gpus, CUDA_VISIBLE_DEVICES="0,1")
    if script == "snmc_dp.py":
        assert found.losses == pytest.approx(right(script).losses, rel=1e-4)
    else:
        found.equals(right(script, *more))


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_planted_mistakes_are_further_off_than_the_limits(precision, kind, host, tmp_path):
    """Of two processes, which on a machine with one GPU share it by Gloo. The limits for GPUs have
    a margin, in which the smallest mistakes may hide (docs/evidence/equality.md).
    """
    script, how = ladder.TIMED[precision]
    if precision == "bf16" and host.gpus[0].capability < (8, 0):
        pytest.skip("this GPU has no bf16")
    sharing = SHARE_A_GPU if len(host.gpus) == 1 else ()
    mistakes = [*PLANTED] if kind == "real" else ["gradients summed"]
    paths = write_scripts(tmp_path, precision, mistakes, *sharing)
    about = {"technique": precision, "flags": how.flags, "variables": how.variables, "batch": 64}
    rows = [cases.Case(n, str(p), script.launcher, 2, **about) for n, p in paths.items()]
    flags = ["--dataset", "fashion-mnist", "--data", "data"]
    flags += [] if kind == "real" else ["--arch", real.ARCH]
    outcomes = gate.train_cases(rows, flags, host, print)
    found = {case.name: gate.judge(case, *outcomes[case.name], host) for case in rows}
    far = {name: excess(judged, gate.limits(rows[0], host)) for name, judged in found.items()}
    print(precision, {name: f"{x:.2g}" for name, x in far.items()})
    assert found["right"]["passed"] and far["right"] < 0.5, found["right"]
    hidden = {name for name, x in far.items() if x <= 1} - {"right"}
    small = {"no weight decay", "evaluation with each rank's averages"}
    assert hidden <= small | ({"no zero_grad"} if precision == "fp16" else set())


def test_more_processes_than_gpus_are_refused(kind):
    """In one line. NCCL allows one process per GPU, and says so in a page of text."""
    env = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "CUDA_VISIBLE_DEVICES": "0"}
    prepare = two_gpus if kind == "pretended" else None
    done = forked("mnmc_ddp_launch.py", prepare=prepare, **env)
    refused(done, "--nproc-per-node: this machine has 1 GPUs")


def test_what_would_be_emulated_is_refused():
    """PyTorch would compute bf16 slowly."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "RANK": 0, "LOCAL_RANK": 0}
    env |= {"WORLD_SIZE": 1, "CUDA_VISIBLE_DEVICES": "0,1"}
    done = forked("techniques/amp.py", *TWO_STEPS, prepare=old_gpus, **env)
    refused(done, "--amp bf16: this GPU has no bf16")


def test_hidden_gpus_are_not_used(kind, tmp_path):
    log = tmp_path / "log"
    prepare = two_gpus if kind == "pretended" else None
    flags = [*TWO_STEPS, "--log-json", log]
    succeeded(forked("snsc.py", *flags, prepare=prepare, CUDA_VISIBLE_DEVICES=""))
    assert records(log)[0]["device_name"] == "cpu"


# Runs a script, and counts by PyTorch's profiler what it copied, and how often it waited.
PROFILED = """
import json, runpy, sys
import torch
out, sys.argv = sys.argv[1], sys.argv[2:]
kinds = torch.profiler.ProfilerActivity
with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as p:
    runpy.run_path(sys.argv[0], run_name="__main__")
counts = {}
for event in p.events():
    counts[event.name] = counts.get(event.name, 0) + 1
json.dump(counts, open(out, "w"))
"""


def unlogged(tmp_path, steps: int) -> list:
    """The flags of an epoch of this many steps and one line of training, at its end."""
    data = write_idx(tmp_path / str(steps), 64 * steps, 20)
    flags = ["--dataset", "fashion-mnist", "--data", data, "--batch-size", 64]
    return [*flags, "--epochs", 1, "--log-every", 1000]


@pytest.mark.gpu
def test_a_step_copies_its_batch_and_waits_for_nothing(kind, tmp_path):
    """By PyTorch's profiler: ten more steps between two log lines bring no further wait.

    They copy images and labels from pinned memory, and three random numbers per image. Nothing
    comes back from the GPU.
    """

    def counts(steps: int) -> dict[str, int]:
        out = tmp_path / f"{steps}.json"
        command = [sys.executable, "-c", PROFILED, out, "snsc.py", *unlogged(tmp_path, steps)]
        succeeded(process.run(command, 300))
        return json.loads(out.read_text())

    few, many = counts(10), counts(20)
    more = {name: many[name] - few.get(name, 0) for name in many}
    print({name: count for name, count in more.items() if count})
    assert sum(n for name, n in more.items() if "Synchronize" in name) == 0
    assert sum(n for name, n in more.items() if "DtoH" in name) == 0
    assert sum(n for name, n in more.items() if "HtoD" in name) == 30
    assert sum(n for name, n in more.items() if "HtoD" in name and "Pinned" in name) >= 20


@pytest.mark.full
def test_a_run_on_a_gpu_has_its_table(kind, tmp_path, monkeypatch):
    """Gates, a block, and the memory of the GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (gpu,) = hosts.look().gpus
    flags = ["run", "--dataset", "fashion-mnist", "--blocks", "1", "--only", "again"]
    flags += ["--arch", real.ARCH, "--batch-size", "16"]
    assert main([*flags, "--out", str(tmp_path / "run")]) == 0
    known = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").open()]
    found = [record for record in known if record["kind"] == "sample"]
    assert {record["case"] for record in found} == {cases.PLAIN, cases.AGAIN}
    text = (tmp_path / "run" / "table.md").read_text()
    assert f"1 x {gpu.name}" in text
    for record in found:
        (row,) = re.findall(rf"^\| {re.escape(record['case'])} \|.*", text, re.M)
        assert f" {record['end']['peak_memory_mib']:,.0f} |" in row
    if kind == "real":
        assert any("gpu_clock_mhz" in record["conditions"] for record in found)


@pytest.mark.parametrize("how", ["tf32", *full("fp16")])
def test_imagenet_trains_and_resumes(kind, host, photos, tmp_path, how):
    """Two steps, in fp16 then two more from its checkpoint, on four GPUs at most."""
    flags = [word for word in photos if word not in ("imagenet", "--dataset", "cpu", "--device")]
    flags += ["--out", tmp_path, "--precision", how, "--workers", 2, "--arch", "resnet18"]
    flags += ["--warmup-epochs", 0.5, "--channels-last", "--model-ema-decay", 0.9, "--lr", 0.01]
    for stop in (2, 4) if how == "fp16" else (2,):
        words = ["imagenet.py", *flags, "--max-steps", stop]
        if kind == "pretended":
            succeeded(*world(2, *words, prepare=two_gpus, CUDA_VISIBLE_DEVICES="0,1"))
        else:
            succeeded(torchrun(min(4, len(host.gpus)), *words))
    known = records(tmp_path / "log.jsonl")
    assert [line["step"] for line in known if line["event"] == "train"] == [*range(1, stop + 1)]
    assert all(line["loss"] < 10 for line in known if line["event"] == "train")


def test_a_script_with_a_tensor_on_the_wrong_device(tmp_path):
    """A mistake in snsc.py: pretended GPUs find it, as real ones do."""
    text, old = (ROOT / "snsc.py").read_text(), "labels = labels.to(device, non_blocking=True)"
    assert old in text
    script = tmp_path / "snsc.py"
    script.write_text(text.replace(old, "pass"))
    done = forked(script, *TWO_STEPS, prepare=two_gpus, CUDA_VISIBLE_DEVICES="0")
    assert done.code == 1 and "must be on one device" in done.err, done
