"""GPUs and clusters that are not here: cases, environments and commands by a Host made by hand.

With -m gpu, what a real one says of itself.
"""

import json
import math
import re
import runpy
import subprocess
import sys
from dataclasses import asdict, replace

import made_up
import pytest
from support import GATED, ROOT, succeeded

from bench import backends, cases, ladder, process
from bench import host as hosts
from bench.__main__ import main, parse
from bench.flops import PEAKS, flops, peak
from bench.host import Gpu, Host
from bench.run import conditions, gate

CPU = Host("C", 2)
V100 = Gpu("Tesla V100-SXM2-16GB", (7, 0))
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))
EIGHT = Host("C", 64, gpus=(V100,) * 8)


def chosen(host: Host, *flags: str) -> dict[str, cases.Case]:
    """The cases of a command line by name."""
    return {case.name: case for case in cases.chosen(parse(["run", *flags]), host)}


# --- what a Host is

# What a child of ours says, in place of torch.
STAND_IN = """
import json, sys
if sys.argv[1:] == ["-m", "bench.host"]:
    print("a line that some library prints")
    print(json.dumps({gpus}))
"""


@pytest.fixture
def torch_shows(tmp_path, monkeypatch):
    """Makes `look` find these GPUs, and the driver one V100."""

    def show(*gpus: Gpu) -> None:
        python = tmp_path / "python"
        said = [vars(gpu) | {"capability": list(gpu.capability)} for gpu in gpus]
        text = STAND_IN.replace("{gpus}", f"json.loads({json.dumps(json.dumps(said))})")
        python.write_text(f"#!{interpreter}\n{text}")
        python.chmod(0o755)
        monkeypatch.setitem(sys.modules, "pynvml", made_up.nvml(["Tesla V100"]))
        monkeypatch.setattr(sys, "executable", str(python))

    interpreter = sys.executable
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return show


def test_the_gpus_are_those_that_torch_shows(torch_shows, monkeypatch):
    """With and without NVML; none where CUDA_VISIBLE_DEVICES hides them."""
    torch_shows(H100, V100)
    found = hosts.look()
    assert found.gpus == (H100, V100) and found.tf32 and found.driver == "580.1"
    assert found.record()["gpus"] == found.gpu_names == [H100.name, V100.name]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert not hosts.look().tf32
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert hosts.look().gpus == (H100, V100) and not hosts.look().driver
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not hosts.look().gpus


def test_torch_may_take_minutes_to_show_the_gpus(torch_shows, monkeypatch):
    """When it is first read from a slow disk. Without its answer, the CPU would be measured."""
    torch_shows(H100)
    real = subprocess.run

    def slow(words, **options):
        if "bench.host" in words and options["timeout"] < 300:
            raise subprocess.TimeoutExpired(words, options["timeout"])
        return real(words, **options)

    monkeypatch.setattr(subprocess, "run", slow)
    assert hosts.look().gpus == (H100,)


def test_gpus_that_torch_cannot_use_are_said(torch_shows, capsys):
    """A torch whose CUDA is too new for the driver would train on the CPU and say nothing."""
    torch_shows()
    with pytest.raises(SystemExit) as ended:
        main(["run"])
    assert ended.value.code == 2
    assert "nvidia-smi shows Tesla V100, which torch cannot use" in capsys.readouterr().err


def test_only_what_may_be_told_is_recorded(monkeypatch):
    """Slurm, a cloud or a user puts secrets beside the variables that explain a speed."""
    secrets = {"SLURM_JWT": "secret", "SLURM_JOB_ID": "secret", "NCCL_COMM_ID": "secret"}
    secrets |= {"TORCH_TOKEN": "secret", "HOROVOD_SECRET_KEY": "secret", "OMP_TOKEN": "secret"}
    told = {"NCCL_ALGO": "Ring", "OMP_PROC_BIND": "close", "SLURM_CPUS_PER_TASK": "4"}
    for name, value in (secrets | told).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hosts, "output", lambda *_: "")
    record = replace(EIGHT, slurm_job=True).record()
    assert told.items() <= record["variables"].items()
    assert "secret" not in json.dumps(record)


def test_the_commit_of_the_files_or_that_nobody_knows_it(tmp_path, monkeypatch):
    """In a checkout, one that was changed, and a copy without .git, which is not a clean one."""
    monkeypatch.setattr(hosts, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "file").write_text("old")
    assert hosts.checkout() == ("", None)
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@nowhere")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "facts.json").write_text("old")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "one")):
        succeeded(process.run(["git", "-C", tmp_path, *words], 60))
    commit, clean = hosts.checkout()
    assert re.fullmatch("[0-9a-f]{40}", commit) and clean is True
    (tmp_path / "logs" / "facts.json").write_text("new")  # results, after which a run is resumed
    assert hosts.checkout() == (commit, True)
    (tmp_path / "file").write_text("new")
    assert hosts.checkout() == (commit, False)


# --- eight GPUs


def test_eight_gpus_make_their_cases():
    """One for each script and world size; weak scaling, from one GPU at 256."""
    assert cases.worlds(EIGHT) == [1, 2, 4, 8]
    rows = chosen(EIGHT)
    assert list(rows)[:2] == [cases.PLAIN, cases.AGAIN] and len(rows) == 2 + 4 + 5 * 4
    for name, case in rows.items():
        world = int(name.split(" x")[1]) if " x" in name else 1
        workers = 4 * world // case.processes  # four per GPU, also for DataParallel's process
        assert (case.world, case.batch, case.workers) == (world, 256 * world, workers)
    launched, parallel = rows["mnmc_ddp_launch.py x8"], rows["snmc_dp.py x8"]
    assert (launched.threads(EIGHT), parallel.threads(EIGHT)) == (8, 64)
    assert launched.precision(EIGHT) == "fp32"
    assert launched.precision(replace(EIGHT, gpus=(H100,) * 8)) == "tf32"
    assert backends.missing(launched, replace(EIGHT, gpus=(V100,))) == "needs 8 GPUs, 1 here"


def given(command: list[str], flag: str) -> str:
    """What a script gets for a flag: of several, the last."""
    return command[len(command) - command[::-1].index(flag)]


@pytest.mark.parametrize(
    ("flags", "batch", "workers"),
    [
        ([], "2048", "4"),
        (["--scaling", "strong", "--batch-size", "512", "--workers", "8"], "512", "8"),
    ],
)
def test_the_batch_reaches_the_script_and_its_oracle(flags, batch, workers):
    """By the flags of the command: the global batch, and the workers of each process."""
    case = chosen(EIGHT, *flags)["mnmc_ddp_launch.py x8"]
    for words in (case.command("--seed", 0, host=EIGHT), case.oracle("--seed", 0)):
        assert (given(words, "--batch-size"), given(words, "--workers")) == (batch, workers)


def test_the_batch_does_not_follow_the_machine():
    """--world 2 is the same work on two GPUs as on eight; strong: one batch for all."""
    two, flags = replace(EIGHT, gpus=(V100,) * 2), ["--world", "1,2"]
    rows = chosen(EIGHT, *flags)
    assert rows == chosen(two, *flags)
    assert rows["mnmc_ddp_launch.py x2"].batch == 512 and rows[cases.PLAIN].batch == 256
    rows = chosen(EIGHT, *flags, "--scaling", "strong")
    assert rows["mnmc_ddp_launch.py x2"].batch == rows[cases.PLAIN].batch == 512
    alone = rows["one rank of 2 alone"]  # weak: the reference is one rank alone
    assert (alone.batch, alone.workers, alone.threads(EIGHT)) == (256, 4, 32)


def test_each_case_sees_the_gpus_that_it_is_to_use(monkeypatch):
    """nn.DataParallel takes all that it sees; the user's own choice of GPUs is kept."""
    rows = chosen(EIGHT)
    expected = {None: "0,1", "1,3,5": "1,3", "MIG-a,MIG-b,MIG-c": "MIG-a,MIG-b"}
    for visible, seen in expected.items():
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        env = process.environment(**rows["snmc_dp.py x2"].own_variables(EIGHT))
        assert env["CUDA_VISIBLE_DEVICES"] == seen
        launched = rows["mnmc_ddp_launch.py x2"].own_variables(EIGHT)
        assert launched == {"OMP_NUM_THREADS": "32"}
    assert rows[cases.PLAIN].own_variables(EIGHT)["CUDA_VISIBLE_DEVICES"] == "MIG-a"


def test_half_precision_needs_a_device_that_has_it():
    """On a GPU with TF32, which torch uses by itself, plain fp32 is a case, too."""
    found = {case.technique: case for case in cases.techniques(CPU, 2)}
    assert [*found] == ["bf16", "fp16", "channels_last", "compiled"]
    assert "fp16" in backends.missing(found["fp16"], replace(CPU, cpu_flags={"avx512_fp16"}))
    assert backends.missing(found["fp16"], replace(CPU, cpu_flags={"asimdhp"})) is None
    assert "bf16" in backends.missing(found["bf16"], replace(CPU, gpus=(V100,) * 2))
    assert backends.missing(found["bf16"], replace(CPU, gpus=(H100,) * 2)) is None
    host = replace(CPU, gpus=(H100,) * 4)
    fp32, *_, compiled = cases.techniques(host, 4)
    assert process.environment(**fp32.own_variables(host))["NVIDIA_TF32_OVERRIDE"] == "0"
    assert (fp32.precision(host), compiled.precision(host)) == ("fp32", "tf32")


@pytest.mark.parametrize("group", GATED)
def test_each_group_is_held_to_its_oracle(group):
    """The gate's flags are the script's and the oracle's, and both are there."""
    found = chosen(CPU, "--techniques", group)
    for case in found.values():
        if not case.technique:
            continue
        script, how = ladder.TIMED[case.technique]
        assert script.path == case.script and (cases.ROOT / script.path).exists()
        (mine, _), (exact, _) = gate.make_jobs(case, ["--dataset", "fashion-mnist"], CPU)
        assert gate.limits(case, CPU)
        given = " ".join(how.flags if how.gate is None else how.gate)
        assert given.replace(ladder.EQUAL, "64,64") in " ".join(mine)
        assert " ".join(["--split", script.split, *how.exact]).strip() in " ".join(exact)
    assert len({case.name for case in found.values()}) == len(found)


# --- what is compared with what


def compared(host: Host, *flags: str) -> dict[str, cases.Compared]:
    rows = [*chosen(host, *flags).values()]
    assert [cases.recorded(json.loads(json.dumps(asdict(row)))) for row in rows] == rows
    return {row.name: cases.compared_with(row, rows) for row in rows}


def test_claims_compare_one_world_size():
    """A speed-up over eight devices is a ratio, and no claim; one rank alone is the reference."""
    found, plain, ddp = compared(EIGHT), cases.PLAIN, cases.DDP
    assert found[plain] == found[cases.AGAIN] == (None, None, None)
    assert found[f"{ddp} x1"] == (plain, None, None)
    assert found["mnmc_horovod.py x1"] == (plain, f"{ddp} x1", None)
    assert found[f"{ddp} x8"] == (None, None, plain)
    assert found["snmc_dp.py x8"] == (None, f"{ddp} x8", plain)
    found = compared(EIGHT, "--scaling", "strong")
    assert found["snmc_dp.py x8"] == (None, f"{ddp} x8", "one rank of 8 alone")


# --- memory


JOB = "0::/slurm/job_7/step_0"
STAT = "anon 5\ninactive_file 100\n"


@pytest.mark.parametrize(
    "groups, files, free, cores",
    [
        (  # Slurm limits a job, not its steps; the root of version 2 has no such file
            JOB,
            {
                "slurm/job_7/memory.max": "3000",
                "slurm/job_7/memory.current": "1000",
                "slurm/job_7/memory.stat": STAT,
                "slurm/job_7/step_0/memory.max": "max",
                "slurm/job_7/step_0/memory.current": "900",
                "slurm/job_7/step_0/memory.stat": STAT,
                "slurm/job_7/step_0/cpu.max": "max 100000",
                "slurm/job_7/cpu.max": "300000 100000",
            },
            2100,
            3,
        ),
        (  # version 1: the path is the host's
            "4:memory:/docker/c\n3:cpu,cpuacct:/docker/c\n0::/",
            {
                "memory/memory.limit_in_bytes": "3000",
                "memory/memory.usage_in_bytes": "1000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
                "cpu/cpu.cfs_quota_us": "250000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            2100,
            2.5,
        ),
        (JOB, {}, math.inf, math.inf),
    ],
)
def test_limits_are_those_of_all_control_groups_above(groups, files, free, cores, tmp_path):
    """In a job or a pod, the node's memory and cores are not this process's; imagenet.py, too."""
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    where = (tmp_path, tmp_path / "groups")
    assert hosts.cgroup_free(*where) == free
    assert hosts.cgroup_cores(*where) == cores
    assert runpy.run_path(str(ROOT / "imagenet.py"))["cores_by_cgroup"](*where) == cores
    found = hosts.limits(*where)
    if "slurm/job_7/memory.max" in files:
        assert found["memory.max"] == "3000" and found["cpu.max"] == "300000 100000"


# --- NVML


def test_what_is_missing_is_said(monkeypatch, capsys):
    """The GPUs are torch's to tell; their clocks stay unknown, as `doctor` says."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with conditions.Watch(EIGHT) as watch:
        pass
    assert not {key for key in watch.seen(None) if key.startswith("gpu")}
    monkeypatch.setattr(backends, "missing", lambda *_: None)
    unusable = replace(CPU, unusable=("Tesla V100",))
    for host, said in (
        (EIGHT, "missing: nvidia-ml-py"),
        (unusable, "missing: a torch for Tesla V100"),
        (CPU, "nothing is missing"),
    ):
        monkeypatch.setattr(hosts, "look", lambda host=host: host)
        assert main(["doctor"]) == 0
        assert said in capsys.readouterr().out


# --- MFU


@pytest.mark.parametrize(
    ("arch", "outputs", "kernel"),  # of the first layer: its numbers, and what each sums up
    [
        ("resnet18", 64 * 112**2, 3 * 7**2),
        ("vit_b_16", 768 * 14**2, 3 * 16**2),
    ],
)
def test_flops_of_a_step_follow_from_the_forwards(arch, outputs, kernel):
    """torchvision says how many multiply-adds an image's forward takes, in 10**9.

    The step's are 6 FLOPs for each, less what the first layer's input gradient would take.
    """
    from torchvision import models

    forward = models.get_model_weights(arch).DEFAULT.meta["_ops"]
    whole, products = flops(arch, 224, 1000)
    assert (products < 0.01 * whole) == (arch != "vit_b_16") and products > 0
    assert whole / 2e9 + outputs * kernel / 1e9 == pytest.approx(3 * forward, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GB200", None),
    ],
)
def test_a_gpu_has_its_own_peak_or_none(name, key):
    """A part of a GPU, a virtual one and one that is not in the list have no MFU."""
    for precision in ("fp32", "tf32", "fp16", "bf16"):
        tera = PEAKS.get(key, {}).get(precision)
        assert peak([name], precision) == (tera and tera * 1e12)
    assert peak([], "fp32") is None


# --- Slurm


@pytest.mark.parametrize(
    ("srun", "reason"),
    [
        ("exit 0", None),
        ("echo 'srun: error: Unable to allocate resources: Invalid account'; exit 1", "account"),
        ("echo 'srun: error: node7: task 0: Exited with exit code 1'; exit 1", "shared disk"),
    ],
)
def test_slurm_is_tried_before_its_cases(srun, reason, tmp_path, monkeypatch):
    """A job of nothing: an account or a disk that is in the way is a row's reason."""
    for name, line in {"srun": f"{{ {srun}; }} >&2", "sinfo": "echo test up"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    said = backends.no_slurm.__wrapped__()
    assert said is None if reason is None else reason in said


# --- what is missing


def test_what_is_not_installed_names_its_cure(monkeypatch, capsys):
    """A row that cannot run and `doctor` say what to type."""
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(backends, "has", lambda program: False)
    monkeypatch.setattr(hosts, "look", lambda: CPU)
    monkeypatch.setattr(backends, "no_slurm", backends.no_slurm.__wrapped__)
    names = {"mnmc_ddp_slurm.py": "slurm", "mnmc_apex.py": "apex", "mnmc_horovod.py": "horovod"}
    for case in cases.cases(CPU, [2]):
        if case.script in names:
            assert f"--with {names[case.script]}" in backends.missing(case, CPU)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "bash bench/run_all.sh --with slurm,horovod,apex" in said
    assert "(mnmc_ddp_slurm.py x1, mnmc_ddp_slurm.py x2)" in said


# --- a real GPU


@pytest.mark.gpu
def test_this_machines_gpus():
    """Two ways of asking: a child of ours by torch, and torch here."""
    import torch

    found = hosts.look()
    assert len(found.gpus) == torch.cuda.device_count() > 0
    gpu, seen = found.gpus[0], torch.cuda.get_device_properties(0)
    assert (gpu.name, gpu.capability) == (seen.name, (seen.major, seen.minor))
    assert 0 < gpu.free_mib <= seen.total_memory / 2**20
    if nvidia := hosts.nvml():
        assert nvidia.nvmlDeviceGetHandleByUUID(gpu.uuid) and found.driver
