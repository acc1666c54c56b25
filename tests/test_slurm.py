"""mnmc_ddp_slurm.py under a real Slurm of two nodes, and what it makes of Slurm's variables."""

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import kills
import psutil
import pytest
import torch
from real import (
    CLEAN_UP,
    FLAGS,
    cut_short,
    data,
    exact_oracle,
    folder,
    kill_one,
    members,
    oracle,
    short,
    takes_turns,
    train,
)
from support import (
    forked,
    free_port,
    records,
    refused,
    succeeded,
    wait_for,
    wait_until,
    words,
)

from bench import ROOT, backends, process
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
    srun = ["srun", "--kill-on-bad-exit", "--immediate=10", "-N2", "--ntasks-per-node=1"]
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


def test_four_processes_on_two_nodes(slurm, tmp_path):
    """In double precision, where the order of a sum of four hardly matters. Without
    --ntasks-per-node Slurm may put three tasks on one node; here a file of hosts does.
    """
    (tmp_path / "hosts").write_text("node1\nnode1\nnode1\nnode2\n")
    srun = ["srun", "--kill-on-bad-exit", "-N2", "-n4", "--distribution=arbitrary"]
    env = environment(1, **slurm, SLURM_HOSTFILE=str(tmp_path / "hosts"))
    shown = run([*srun, "sh", "-c", "echo $SLURMD_NODENAME"], 60, env).out.splitlines()
    assert sorted(shown) == ["node1"] * 3 + ["node2"]

    def start(script, *flags):
        return run([*srun, sys.executable, *words(script, *flags)], 180, env)

    train(start, SCRIPT, *short(), "--double").equals(exact_oracle(4), rel=1e-8)


CASE = Case("mnmc_ddp_slurm.py x2", SCRIPT, "srun", 2)


def test_a_case_of_the_harness(slurm, monkeypatch):
    """It takes turns under its launcher, and its row says which Slurm that was."""
    takes_turns("slurm-turns", CASE.srun(Host("C", 4)), SCRIPT, **slurm)
    deadline = time.monotonic() + CLEAN_UP
    while jobs := run(["squeue", "-h"], 30, environment(**slurm)).out:  # one that keeps its cores
        assert time.monotonic() < deadline, jobs
        time.sleep(0.3)
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


def test_a_case_in_a_launch_of_its_own(slurm, tmp_path, monkeypatch):
    """Its log is where the nodes see it, and its start-up is counted from srun's start."""
    monkeypatch.setattr(process, "SHARED", tmp_path / "shared")
    command = replace(CASE, batch=64).command(*FLAGS, "--data", data(), host=Host("C", 4))
    begun = time.time()
    lines = process.launch(command, environment(1, **slurm), 180)
    assert [line["event"] for line in lines][-1] == "end"
    assert process.SHARED.is_dir() and not [*process.SHARED.iterdir()]
    assert 0 < lines[0]["startup_seconds"] < time.time() - begun


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
        for _ in range(600):
            if not run(["squeue", "-h", "-j", job], 20, env).out:
                break
            time.sleep(0.3)
    finally:
        run(["scancel", job], 20, env)
    state = run(["scontrol", "show", "job", job], 20, env).out
    assert "JobState=COMPLETED" in state and "ExitCode=0:0" in state, log.read_text()
    weights = torch.load(file)["model"]
    assert all(value.equal(weights[name]) for name, value in oracle(2).weights.items())


@pytest.mark.parametrize("act", ["kill", "scancel", "interrupt"])
def test_a_job_cut_short_ends_whole(slurm, act, monkeypatch):
    """SIGKILL of a process, scancel, Ctrl-C: the job ends, says so, and leaves no process."""

    def cut(ranks):
        if act == "kill":
            kill_one(ranks)
        elif act == "scancel":
            job = ranks["0"].environ()["SLURM_JOB_ID"]
            subprocess.run(["scancel", job], env=environment(**slurm), timeout=20, check=True)
        else:
            job = members(ranks["0"].environ()["TEST_TAG"])
            sruns = [process for process in job if process.name() == "srun"]
            (srun,) = (process for process in sruns if process.parent() not in sruns)
            with suppress(psutil.NoSuchProcess):
                for _ in range(int(CLEAN_UP / 0.2)):
                    srun.send_signal(signal.SIGINT)  # the first only asks what the tasks do
                    time.sleep(0.2)

    command = ["srun", "--kill-on-bad-exit", "-N2", "--ntasks-per-node=1"]
    arguments = (f"slurm-{act}", command, SCRIPT, "SLURM_PROCID", cut, monkeypatch)
    done, seconds = cut_short(*arguments, **slurm)
    assert done.code != 0 and seconds < CLEAN_UP, (done, seconds)
    said = {"kill": r"node2: task 1: Killed", "scancel": "CANCELLED", "interrupt": "sending Ctrl-C"}
    assert re.search(said[act], done.err), done.err


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


def test_a_requeued_job_of_imagenet_resumes(slurm, small_run, whole, tmp_path):
    """Two nodes. It saves before it ends, and the job's next start resumes bit for bit."""
    out, env = tmp_path / "out", environment(1, **slurm)
    words = ["srun", "--kill-on-bad-exit", sys.executable, "imagenet.py", *small_run, "--out", out]
    script, log = tmp_path / "job.sh", out / "log.jsonl"
    script.write_text(f"#!/bin/sh\n{' '.join(map(str, words))}\n")
    command = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--requeue"]
    submitted = run([*command, "-o", tmp_path / "said", script], 30, env)
    succeeded(submitted)
    wait_for(log, 2)
    succeeded(run(["scontrol", "requeue", submitted.out.strip()], 30, env))
    wait_until(lambda: any(r["finished"] for r in records(log, "end", growing=True)), 240)
    starts = records(log, "start")
    assert [r["launcher"] for r in starts] == ["srun"] * 2 and starts[1]["resumed"]
    steps = [r["step"] for r in records(log, "train")]
    assert steps == [*range(1, 12 + 1)]  # none was lost, none was done again
    assert kills.numbers(out) == whole
