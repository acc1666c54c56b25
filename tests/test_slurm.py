"""mnmc_ddp_slurm.py under a real Slurm of two nodes, and what it makes of Slurm's variables."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from real import CLEAN_UP, cut_short, folder, kill_one, oracle, short, takes_turns, train
from support import forked, free_port, records, refused, succeeded, wait_for, wait_until, words

from bench import ROOT, backends
from bench.cases import Case
from bench.host import Gpu, Host
from bench.process import environment, run

pytestmark = pytest.mark.full

SCRIPT = "mnmc_ddp_slurm.py"
STEP = {"PROCID": 1, "LOCALID": 1, "STEP_NUM_TASKS": 4, "JOB_ID": 123456}
STEP |= {"STEP_NODELIST": "node[1-2]"}
STEP = {f"SLURM_{name}": value for name, value in STEP.items()}


def test_two_jobs_at_once_train_what_the_oracle_trains(slurm):
    """Bit for bit, each on its own port. One has a preset address and no scontrol."""
    # --immediate: it is an error if one must wait for the other
    srun = ["srun", "--kill-on-bad-exit", "--immediate=60", "-N2", "--ntasks-per-node=1"]
    preset = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(free_port())}

    def start(script, *flags, before=(), **env):
        command = [*srun, *before, sys.executable, *words(script, *flags)]
        return run(command, 180, environment(1, **slurm, **env))

    with ThreadPoolExecutor() as pool:
        plain = pool.submit(train, start, SCRIPT, *short())
        no_scontrol = ["env", "PATH=/nowhere"]
        other = pool.submit(train, start, SCRIPT, *short(), before=no_scontrol, **preset)
    plain.result().equals(oracle(2))
    other.result().equals(oracle(2))


CASE = Case("mnmc_ddp_slurm.py x2", SCRIPT, "srun", 2)


def test_a_case_of_the_harness(slurm, monkeypatch):
    """It takes turns under its launcher, and its row says which Slurm that was."""
    takes_turns("slurm-turns", CASE.srun(Host("C", 4)), SCRIPT, **slurm)
    wait_until(lambda: not run(["squeue", "-h"], 30, environment(**slurm)).out)  # cores are free
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    backends.no_slurm.cache_clear()  # it was not there when another test asked
    backend = backends.carrier(CASE, Host("C", 4))
    assert re.fullmatch(r"slurm\S* \d+\.\d+\S*, gloo of torch 2\.\S+", backend)


def test_a_case_has_the_cores_of_its_threads_and_the_gpus(slurm):
    """Two cores a process, and two GPUs: Slurm would give one and none without being asked."""
    host = Host("C", 4, gpus=(Gpu("a GPU"),) * 2, slurm_gpus=True)
    show = 'echo "$SLURM_CPUS_PER_TASK $SLURM_CPUS_ON_NODE $SLURM_GPUS_ON_NODE"'
    done = run([*CASE.srun(host), "sh", "-c", show], 60, environment(1, **slurm))
    succeeded(done)
    assert done.out.splitlines() == [f"{CASE.threads(host)} 4 2"] * 2


def test_the_cases_of_one_job_share_its_cores(slurm, tmp_path):
    """Asleep, one of them holds all cores of the job: the next one starts all the same."""
    words = " ".join(CASE.srun(Host("C", 4, slurm_job=True)))
    wait = "touch $0.$1; until [ -e $0.$2 ]; do sleep 0.1; done"  # each for the other
    steps = [f"{words} sh -c '{wait}' {tmp_path}/step {a} {b}" for a, b in ("12", "21")]
    command = ["salloc", "-N1", "-n2", "-c2", "sh", "-c", f"{steps[0]} & {steps[1]}; wait"]
    done = run(command, 60, environment(1, **slurm))
    succeeded(done)
    assert {path.name for path in tmp_path.iterdir()} == {"step.1", "step.2"}


@pytest.mark.parametrize("style", ["ranks", "torchrun"])
def test_batch_jobs(slurm, style):
    """Both styles of sbatch: one task per process, and one task per node that runs torchrun."""
    log, file = (folder() / f"sbatch-{style}.{kind}" for kind in ("log", "pt"))
    each = ["--cpus-per-task=2", *(["--ntasks-per-node=1"] if style == "ranks" else [])]
    sbatch = ["sbatch", "--parsable", "-N2", *each, "-o", log, f"bench/slurm/{style}.sbatch"]
    env = environment(1, **slurm, PYTHON=sys.executable, PROCESSES_PER_NODE="1")
    # Not run(): it would end the job with its launcher, and sbatch is done at once.
    sbatch = [str(part) for part in (*sbatch, *short(), "--save", file)]
    job = subprocess.run(sbatch, env=env, cwd=ROOT, check=True, text=True, stdout=-1).stdout.strip()
    try:
        wait_until(lambda: not run(["squeue", "-h", "-j", job], 20, env).out)
    finally:
        run(["scancel", job], 20, env)
    state = run(["scontrol", "show", "job", job], 20, env).out
    assert "JobState=COMPLETED" in state and "ExitCode=0:0" in state, log.read_text()
    weights = torch.load(file)["model"]
    assert all(value.equal(weights[name]) for name, value in oracle(2).weights.items())


def test_a_job_of_which_a_process_was_killed_ends_whole(slurm, monkeypatch):
    """It says so, and leaves no process."""
    command = ["srun", "--kill-on-bad-exit", "-N2", "--ntasks-per-node=1"]
    arguments = ("slurm-kill", command, SCRIPT, "SLURM_PROCID", kill_one, monkeypatch)
    done, seconds = cut_short(*arguments, **slurm)
    assert done.code != 0 and seconds < 2 * CLEAN_UP  # for which it waits
    assert "node2: task 1: Killed" in done.err


def gpus(count):
    """Pretends that this many GPUs are visible, prints which of them is taken, and ends."""

    def take(device):
        print(device)
        raise SystemExit

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count
    torch.cuda.set_device = take


@pytest.mark.parametrize("count, device", [(1, "cuda:0"), (2, "cuda:1")])
def test_the_gpu_of_the_second_process(count, device):
    """The second of two visible GPUs; with --gpus-per-task=1 the only one that it sees."""
    done = forked(SCRIPT, prepare=partial(gpus, count), MASTER_ADDR="node1", **STEP)
    assert done.out.split() == [device], done


def test_refuses_to_start_in_a_batch_script_without_srun():
    env = {key: value for key, value in STEP.items() if key != "SLURM_STEP_NODELIST"}
    refused(forked(SCRIPT, "--device", "cpu", **env), "start this script with srun")


def test_a_requeued_job_of_imagenet_resumes(slurm, small_run, tmp_path):
    """Two nodes. It saves before it ends, and the job's next start goes on with the next step."""
    out, env = tmp_path / "out", environment(1, **slurm)
    words = ["srun", "--kill-on-bad-exit", sys.executable, "imagenet.py", *small_run]
    script, log = tmp_path / "job.sh", out / "log.jsonl"
    script.write_text(f"#!/bin/sh\n{' '.join(map(str, [*words, '--epochs', 400, '--out', out]))}\n")
    command = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--requeue"]
    submitted = run([*command, "-o", tmp_path / "said", script], 30, env)
    succeeded(submitted)
    job = submitted.out.strip()
    try:
        wait_for(log, 2)
        succeeded(run(["scontrol", "requeue", job], 30, env))
        wait_for(log, 3, starts=2)
    finally:
        run(["scancel", job], 30, env)
    starts = records(log, "start", growing=True)
    assert [r["launcher"] for r in starts] == ["srun"] * 2 and starts[1]["resumed"]
    steps = [r["step"] for r in records(log, "train", growing=True)]
    assert steps == [*range(1, len(steps) + 1)]  # none was lost, none was done again
