"""The scripts on GPUs: with -m gpu on this machine's, otherwise on two that torch pretends to have.

tests/pretend/sitecustomize.py says what pretended GPUs cannot show.
"""

import json
import sys
from functools import cache

import pytest
import real
from real import numbers, output
from support import (
    GATED,
    ORACLE,
    ROOT,
    SCRIPTS,
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
from bench.__main__ import main, parse
from bench.host import Host
from bench.run import gate

KINDS = ["pretended", pytest.param("real", marks=pytest.mark.gpu)]
PRETENDED = {"PYTHONPATH": str(ROOT / "tests" / "pretend"), "PRETEND_GPUS": "2"}
NAMES = [case.name.split(" x")[0] for case in cases.cases(Host("a CPU", 1), [1])]
NAMES = [name for name in NAMES if name != cases.AGAIN]
for group in GATED:
    found = ladder.in_group(group).items()
    NAMES += [name for name, (script, _) in found if name != "fp32" and not script.arch]
TWO_STEPS = ["--dataset", "fashion-mnist", "--images", 32, 20, "--batch-size", 16]
TWO_STEPS += ["--epochs", 1, "--log-every", 1, "--arch", real.ARCH]
# Pretended GPUs lack SyncBatchNorm's kernels, DALI's, Horovod's NCCL, and what Apex compiles.
LACKING = ("techniques/syncbn.py", "techniques/dali.py", "mnmc_horovod.py", "mnmc_apex.py")
LACKING += ("techniques/parameter_server.py",)  # two workers and a server are three GPUs
LACKING += ("techniques/parallel_3d.py",)  # a mesh of three dimensions
LACKING += ("techniques/oneflow_ddp.py",)  # it runs without torch
# Techniques whose flags make another script of theirs.
RESNET = ["--arch", "resnet18", "--image-size", 16]  # FSDP is slow with many tensors
FURTHER = {
    "techniques/fsdp.py": [RESNET],
    "techniques/hybrid_fsdp.py": [RESNET],
    "techniques/amp.py": [["--amp", "bf16"], ["--amp", "fp16", "--batch-size", 16]],
    "techniques/comm_hooks.py": [["--hook", "bf16"], ["--hook", "powersgd"]],
    "techniques/deepspeed_zero.py": [["--stage", "1"], ["--stage", "3"]],
    "techniques/heterogeneous.py": [["--shares", "40,24"]],
}
RUNS = [(s, more) for s in SCRIPTS if s not in LACKING for more in FURTHER.get(s, [[]])]
DEFAULT = ("snmc_dp.py", "mnmc_ddp_launch.py", "techniques/fsdp.py")  # without --full
RUNS = [run if run[0] in DEFAULT else full(run)[0] for run in RUNS]
ONE_PROCESS = [path for path, script in ladder.SCRIPTS.items() if not script.processes]
# With one visible GPU, mnmc_ddp_slurm.py takes it: Slurm may show each task only its own.
BY_TORCHRUN = (*LACKING, *ONE_PROCESS, "mnmc_ddp_mp.py", "mnmc_ddp_slurm.py")
BY_TORCHRUN = [script for script in SCRIPTS if script not in BY_TORCHRUN]


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


# These have arithmetic of their own: they are compared with their run on a CPU.
OWN = ("grad_accum", "no_sync", "channels_last")
OWN += ("amp", "comm_hooks", "local_sgd", "deepspeed_zero", "fsdp", "hybrid_fsdp", "pipeline")
OWN += ("pipeline_by_hand", "custom_optimizer", "invariant", "uneven_inputs", "heterogeneous")
OWN += ("tensor_parallel", "tensor_parallel_by_hand", "parallel_2d", "context_parallel")
OWN = [f"techniques/{name}.py" for name in OWN]


def run(script: str, *flags, **keywords) -> list[tuple]:
    """The numbers of a script with two devices, or with one if it can use only one."""
    name = f"{script.replace('/', '-')}{'-pretended' * bool(keywords)}"
    arch = script in ladder.SCRIPTS and ladder.SCRIPTS[script].arch
    given = [word for word in real.FLAGS if word not in ("--device", "cpu")]
    flags = [*given, "--arch", arch or real.ARCH, "--epochs", 1, *flags, *output(name)]
    if script == "mnmc_ddp_mp.py":
        env = PRETENDED | {"CUDA_VISIBLE_DEVICES": "0,1"} if keywords else {}
        succeeded(python(script, *flags, "--nproc-per-node", 2, **env))
    elif script in (*ONE_PROCESS, ORACLE):
        succeeded(forked(script, *flags, **keywords))
    elif script == "mnmc_ddp_slurm.py":
        succeeded(*real.as_srun(2, script, *flags, **keywords))
    else:
        succeeded(*world(2, script, *flags, **keywords))
    start = records(flags[flags.index("--log-json") + 1])[0]
    assert start["device_name"] == ("Pretended GPU" if keywords else "cpu")
    return numbers(flags)


@cache
def oracle(parts: int, split: str) -> list[tuple]:
    """What the scripts must train, on a CPU."""
    return run(ORACLE, "--parts", parts, "--split", split)


@pytest.mark.parametrize(("script", "more"), RUNS)
def test_the_way_for_gpus_trains_the_same(script, more, request):
    """Pretended GPUs compute as the CPU does. If the numbers differ, it is the script's doing.

    To the last bit they are the oracle's, or the script's own on a CPU. nn.DataParallel gives each
    GPU half of the batch. So BatchNorm sees halves, and two means are averaged in another order.
    """
    if (name := ladder.SCRIPTS[script].library) and not backends.installed(name):
        request.getfixturevalue("libraries")
    found = run(script, *more, prepare=two_gpus, CUDA_VISIBLE_DEVICES="0,1")
    if script in OWN:
        assert found == run(script, *more)
    elif script == "snmc_dp.py":
        real.compare(found, oracle(2, "contiguous"), 1e-4)
    else:  # on pretended GPUs nothing is compiled
        parts = 1 if script in ONE_PROCESS else 2
        real.compare(found, oracle(parts, ladder.SCRIPTS[script].split), 0)


@pytest.fixture(scope="module")
def judged(host) -> dict[str, dict]:
    """For every case on all GPUs: the gate's record, or the reason why there is none.

    The keys are the cases' names without the number of GPUs.
    """
    world = len(host.gpus)
    rows = cases.cases(host, [world]) + cases.techniques(host, world, GATED)
    flags = ["run", "--dataset", "fashion-mnist", "--scaling", "strong", "--batch-size", "64"]
    rows = {case.name.split(" x")[0]: case for case in cases.scaled(rows, parse(flags), host)}
    missing = {name: backends.missing(case, host) for name, case in rows.items()}
    mine = {name: case for name, case in rows.items() if not missing[name]}
    outcomes = gate.train_cases([*mine.values()], ["--dataset", "fashion-mnist"], host, print)
    found = {name: gate.judge(case, *outcomes[case.name], host) for name, case in mine.items()}
    return found | {name: {"missing": reason} for name, reason in missing.items() if reason}


@pytest.mark.gpu
@pytest.mark.timeout(1800)  # the first one runs all gates
@pytest.mark.parametrize("name", NAMES)
def test_trains_what_the_oracle_trains(judged, name):
    """On all GPUs, by the benchmark's gate, which runs before anything is timed."""
    found = judged[name]
    if "missing" in found:
        pytest.skip(found["missing"])
    print(name, found.get("distance"), found.get("update"), found.get("evaluation"))
    assert found["passed"], found["reason"]


@pytest.mark.parametrize("script", [BY_TORCHRUN[0], *full(*BY_TORCHRUN[1:])])
def test_more_processes_than_gpus_are_refused(kind, script, request):
    """In one line. NCCL allows one process per GPU, and says so in a page of text."""
    if (name := ladder.SCRIPTS[script].library) and not backends.installed(name):
        request.getfixturevalue("libraries")
    env = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "CUDA_VISIBLE_DEVICES": "0"}
    done = forked(script, prepare=two_gpus if kind == "pretended" else None, **env)
    refused(done, "--nproc-per-node: this machine has 1 GPUs")


@pytest.mark.parametrize("script", ONE_PROCESS)
def test_hidden_gpus_are_not_used(kind, script, tmp_path):
    log = tmp_path / "log"
    prepare = two_gpus if kind == "pretended" else None
    flags = [*TWO_STEPS, "--log-json", log]
    succeeded(forked(script, *flags, prepare=prepare, CUDA_VISIBLE_DEVICES=""))
    assert records(log)[0]["device_name"] == "cpu"


def trained(script: str, *flags, tmp_path, gpus: int | None = None) -> list[dict]:
    """The records of a run: by torchrun with this many processes, or by Python."""
    log = tmp_path / f"{script.replace('/', '-')}{len([*tmp_path.iterdir()])}"
    flags = [*TWO_STEPS, *flags, "--log-json", log]
    succeeded(torchrun(gpus, script, *flags) if gpus else python(script, *flags))
    return records(log)


@pytest.mark.gpu
def test_what_saves_memory_on_gpus(kind, host, tmp_path):
    """With one process: fewer activations, or smaller ones. (Sharding needs several processes.)"""
    flags = ["--batch-size", 512, "--images", 1536, 20, "--arch", "resnet18"]

    def peak(script, *more):
        end = trained(script, *flags, *more, tmp_path=tmp_path, gpus=1)[-1]
        return end["peak_memory_mib"]

    plain, checkpointed, half = (
        peak("mnmc_ddp_launch.py"),
        peak("techniques/activation_checkpointing.py"),
        peak("techniques/amp.py", "--amp", "bf16"),
    )
    parts = peak("techniques/no_sync.py", "--accum-steps", 4)
    assert max(checkpointed, half, parts) < plain < host.gpus[0].free_mib


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


# Runs a script, and makes the GPU sleep in its tenth step. In the next step it prints whether the
# GPU still sleeps. A step launches some 300 kernels, and up to 1,000 may wait in CUDA's queue.
SLEEPING = """
import runpy, sys
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
del sys.argv[0]
steps, awake = [], torch.cuda.Event()
def step(*_):
    steps.append(None)
    if len(steps) == 10:
        torch.cuda.synchronize()
        torch.cuda._sleep(10**10)  # cycles: about 5 s
        awake.record()
    if len(steps) == 11:
        print("asleep", not awake.query())
register_optimizer_step_pre_hook(step)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("script", ["snsc.py", "mnmc_ddp_launch.py"])
def test_a_step_does_not_wait_for_the_step_before(kind, script, tmp_path):
    """The process comes to the next optimizer.step() while the GPU still sleeps."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", SLEEPING, script, *unlogged(tmp_path, 12)]
    done = process.run(command, 300, process.environment(1, **env))
    succeeded(done)
    assert "asleep True" in done.out.splitlines()


@pytest.mark.full
def test_a_run_on_a_gpu_has_its_table(kind, tmp_path, monkeypatch):
    """Gates, a trial of each case, a block, and the memory of the GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (gpu,) = hosts.look().gpus
    flags = ["run", "--quick", "--dataset", "fashion-mnist", "--blocks", "1", "--only", "again"]
    flags += ["--arch", real.ARCH, "--batch-size", "16"]
    assert main([*flags, "--out", str(tmp_path / "run")]) == 0
    known = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").open()]
    found = {kind: [r for r in known if r["kind"] == kind] for kind in ("trial", "sample")}
    names = [cases.PLAIN, cases.AGAIN]
    for lines in found.values():
        assert {record["case"] for record in lines} == {*names}
    assert all(record["step_seconds"] > 0 for record in found["trial"])
    text = (tmp_path / "run" / "table.md").read_text()
    assert f"1 x {gpu.name}" in text
    for name, record in zip(
        names, sorted(found["trial"], key=lambda r: names.index(r["case"])), strict=True
    ):
        row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
        assert row.split(" | ")[-1] == f"{record['end']['peak_memory_mib']:,.0f} |"
    if kind == "real":
        assert any("gpu_clock_mhz" in record["conditions"] for record in found["sample"])


@pytest.mark.parametrize("how", ["fp32", *full("tf32", "bf16", "fp16")])
def test_imagenet_trains_and_resumes(kind, host, photos, tmp_path, how):
    """Two steps, then two more from its checkpoint, on all GPUs."""
    flags = [word for word in photos if word not in ("imagenet", "--dataset", "cpu", "--device")]
    flags += ["--out", tmp_path, "--precision", how, "--workers", 2, "--arch", "resnet18"]
    flags += ["--warmup-epochs", 0.5, "--channels-last", "--model-ema-decay", 0.9, "--lr", 0.01]
    for steps in (2, 4):
        words = ["imagenet.py", *flags, "--max-steps", steps]
        if kind == "pretended":
            succeeded(*world(2, *words, prepare=two_gpus, CUDA_VISIBLE_DEVICES="0,1"))
        else:
            succeeded(torchrun(len(host.gpus), *words))
    known = records(tmp_path / "log.jsonl")
    assert [line["step"] for line in known if line["event"] == "train"] == [1, 2, 3, 4]
    assert all(line["loss"] < 10 for line in known if line["event"] == "train")


@pytest.mark.full
def test_imagenet_says_how_fast_it_loads_and_trains(host, photos, tmp_path):
    """Each by itself, on one GPU, with all that makes training fast."""
    flags = [word for word in photos if word not in ("imagenet", "--dataset", "cpu", "--device")]
    flags += ["--precision", "bf16", "--channels-last", "--compile", "--workers", 1]
    flags += ["--arch", "resnet18", "--warmup-epochs", 0.5]
    record = tmp_path / "speed.jsonl"
    command = [sys.executable, "-m", "bench.lab.recipe", "--record", record, "--seconds", 1]
    succeeded(process.run([*command, *flags], 300, process.environment(1)))
    (line,) = records(record)
    assert line["event"] == "bench" and line["device_name"] == host.gpus[0].name
    assert line["loader"] > 0 and line["device"] > 0 and line["compile"] and line["classes"] == 3


# --- the pretended ones

WRONG = {  # what a GPU refuses, and words of the message here
    "torch.ones(2, device='cuda') + torch.ones(2)": "found cpu and cuda:0",
    "torch.ones(2, device='cuda:1') + torch.ones(2, device='cuda:0')": "cuda:0 and cuda:1",
    "torch.nn.Linear(2, 2).to('cuda')(torch.ones(1, 2))": "found cpu and cuda:0",
    "torch.ones(2)[torch.zeros(1, dtype=int, device='cuda')]": "found cpu and cuda:0",
    "torch.ones(2, device='cuda').numpy()": "can't convert cuda:0",
    "torch.ones(2, device='cuda').pin_memory()": "cannot pin",
    "torch.ones(2).to('cuda:2')": "invalid device ordinal",
}


# Runs lines in one process, and prints for each the last line of its error.
EACH = """
import sys
import torch
for line in sys.argv[1:]:
    try:
        exec(line)
        print("no error")
    except Exception as error:
        print(str(error).splitlines()[-1])
"""


def test_what_a_gpu_would_refuse(monkeypatch):
    """Otherwise these tests could not find it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "pretend"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PRETEND_GPUS", "2")
    done = process.run([sys.executable, "-c", EACH, *WRONG], 100)
    succeeded(done)
    for line, words, said in zip(WRONG, WRONG.values(), done.out.splitlines(), strict=True):
        assert words in said, (line, said)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("labels = labels.to(device, non_blocking=True)", "pass"),
        ("draws.to(device, non_blocking=True)", "draws"),
    ],
)
def test_a_script_with_a_tensor_on_the_wrong_device(old, new, tmp_path):
    """A mistake in snsc.py."""
    text = (ROOT / "snsc.py").read_text()
    assert text.count(old) >= 1
    script = tmp_path / "snsc.py"
    script.write_text(text.replace(old, new))
    done = forked(script, *TWO_STEPS, prepare=two_gpus, CUDA_VISIBLE_DEVICES="0")
    assert done.code == 1 and "must be on one device" in done.err, done
