"""mnmc_ddp_slurm.py under a real Slurm of two nodes, and what it makes of Slurm's variables."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import kills
import psutil
import pytest
from real import (
    CLEAN_UP,
    FLAGS,
    compare,
    cut_short,
    data,
    exact_oracle,
    folder,
    kill_one,
    members,
    numbers,
    oracle,
    output,
    printed,
    short,
    takes_turns,
    train,
)
from support import (
    checkpoint,
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
from bench.host import Host
from bench.process import environment, run

pytestmark = pytest.mark.full

SCRIPT = "mnmc_ddp_slurm.py"
STEP = {"PROCID": 1, "LOCALID": 1, "STEP_NUM_TASKS": 4, "JOB_ID": 123456}
STEP |= {"STEP_NODELIST": "node[1-2]"}
STEP = {f"SLURM_{name}": value for name, value in STEP.items()}


@pytest.fixture(scope="module")
def two(slurm):
    """Two jobs of two processes at once. One has a preset address and no scontrol."""
    plain, preset = output("slurm2"), output("slurm2-preset")
    environments = [
        environment(1, **slurm),
        environment(1, **slurm, MASTER_ADDR="127.0.0.2", MASTER_PORT=str(free_port())),
    ]
    # --immediate: it is an error if one must wait for the other
    srun = ["srun", "--kill-on-bad-exit", "--immediate=10", "-N2", "--ntasks-per-node=1"]
    weights = plain[-1].with_suffix(".pt")
    commands = [
        [*srun, sys.executable, *words(SCRIPT, *FLAGS, *plain, "--save", weights)],
        [*srun, "env", "PATH=/nowhere", sys.executable, *words(SCRIPT, *FLAGS, *preset)],
    ]
    with ThreadPoolExecutor() as pool:
        succeeded(*pool.map(run, commands, [180, 180], environments))
    checkpoint(weights)
    return [numbers(plain), numbers(preset)]


@pytest.mark.parametrize("job", [0, 1], ids=["plain", "preset_address_and_no_scontrol"])
def test_two_nodes_train_what_the_oracle_trains(two, job):
    """Bit for bit, two jobs at once, each on its own port."""
    compare(two[job], oracle(2), tolerance=0)


@pytest.mark.parametrize("layout", ["2,2", "3,1"])
def test_four_processes_on_two_nodes(slurm, layout, tmp_path):
    """In double precision, where the order of a sum of four hardly matters. Without
    --ntasks-per-node Slurm may put three tasks on one node; here a file of hosts does.
    """
    srun = ["srun", "--kill-on-bad-exit", "-N2", "-n4"]
    if layout == "2,2":
        srun += ["--ntasks-per-node=2", "--gpus-per-task=1"]
        env = environment(1, **slurm)
    else:
        (tmp_path / "hosts").write_text("node1\nnode1\nnode1\nnode2\n")
        srun += ["--distribution=arbitrary"]
        env = environment(1, **slurm, SLURM_HOSTFILE=str(tmp_path / "hosts"))
    shown = run([*srun, "sh", "-c", "echo $SLURM_STEP_TASKS_PER_NODE"], 60, env)
    assert shown.out.split() == [layout.replace("2,2", "2(x2)")] * 4, shown.err

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


def test_a_case_has_the_cores_of_its_threads(slurm):
    """Two cores a process, which Slurm would give one without being asked."""
    host, show = Host("C", 4, all_cores=True), 'echo "$SLURM_CPUS_PER_TASK $SLURM_CPUS_ON_NODE"'
    done = run([*CASE.srun(host), "sh", "-c", show], 60, environment(1, **slurm))
    succeeded(done)
    assert done.out.splitlines() == [f"{CASE.threads(host)} 4"] * 2


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
    flags = [*FLAGS, "--data", data()]
    log = folder() / f"sbatch-{style}.log"
    each = ["--ntasks-per-node=1"] if style == "ranks" else []
    sbatch = ["sbatch", "--parsable", "-N2", *each, "-o", log, f"bench/slurm/{style}.sbatch"]
    env = environment(1, **slurm, PYTHON=sys.executable, PROCESSES_PER_NODE="1")
    # Not run(): it would end the job with its launcher, and sbatch is done at once.
    sbatch = [str(part) for part in (*sbatch, *flags)]
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
    rounded = [(what, *(float(f"{x:.9g}") for x in rest)) for what, *rest in oracle(2)]
    compare(printed(log.read_text()), rounded, tolerance=0)


def test_each_process_is_given_its_gpu(slurm):
    """What --gpus-per-task=1 hands out reaches the processes: all of both nodes' GPUs, once."""
    show = "import os, socket; print(socket.gethostname(), os.environ['CUDA_VISIBLE_DEVICES'])"
    srun = ["srun", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1", "python3", "-c", show]
    done = run(srun, 60, environment(1, **slurm))
    succeeded(done)
    assert sorted(done.out.splitlines()) == ["node1 0", "node1 1", "node2 0", "node2 1"]


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


# What the script makes of Slurm's variables; the process group is never made.


def stop_at_the_process_group():
    """Prints what section 0 has decided, and does not wait for processes that do not exist."""
    import torch

    def show(*_, rank, world_size):
        print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank, world_size)
        raise SystemExit

    torch.distributed.init_process_group = show


def two_gpus():
    stop_at_the_process_group()
    a_gpu(2)


def one_gpu():
    stop_at_the_process_group()
    a_gpu(1)


def a_gpu(count):
    """Pretends that this many GPUs are visible, and prints which of them is taken."""
    import torch

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count
    torch.cuda.set_device = lambda device: print(device, end=" ")


@pytest.fixture
def scontrol(tmp_path):
    """PATH with a scontrol on it that runs this line of shell, and nothing else."""

    def write(line: str) -> dict:
        file = tmp_path / "scontrol"
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)
        return {"PATH": tmp_path}

    return write


def start(prepare=stop_at_the_process_group, **env):
    return forked(SCRIPT, "--device", "cpu", prepare=prepare, limit=60, **STEP | env)


ASKED = '[ "$*" = "show hostnames node[1-2]" ] || exit 9; '  # what scontrol is to be asked


@pytest.mark.parametrize("names", [["node1", "node2"], ["gpu-a-007"], ["10.0.0.5", "10.0.0.6"]])
def test_the_address_is_the_first_that_scontrol_names(names, scontrol):
    """scontrol expands Slurm's short form of a list of nodes. The job's number gives the port."""
    said = r"\n".join(names)
    done = start(**scontrol(f"{ASKED} printf '{said}\\n'"))
    assert done.out.split() == [names[0], "23456", "1", "4"] and not done.err, done


def test_a_preset_address_is_kept_and_needs_no_scontrol():
    """For another network interface, or for two steps at once in a job."""
    done = start(PATH="/nowhere", MASTER_ADDR="10.0.0.9", MASTER_PORT=4567)
    assert done.out.split()[:2] == ["10.0.0.9", "4567"] and not done.err, done


@pytest.mark.parametrize("line", ["echo slurm_load: no such node >&2; exit 1", None])
def test_without_the_first_machines_name(line, scontrol):
    """scontrol fails, or is missing: the script ends by Python's traceback, which names it."""
    done = start(**(scontrol(line) if line else {"PATH": "/nowhere"}))
    assert done.code == 1 and "scontrol" in done.last_line and not done.out


@pytest.mark.parametrize("prepare, device", [(one_gpu, "cuda:0"), (two_gpus, "cuda:1")])
def test_the_gpu_of_the_second_process(prepare, device, scontrol):
    """The second of two visible GPUs; with --gpus-per-task=1 the only one that it sees."""
    done = forked(SCRIPT, prepare=prepare, **STEP, **scontrol("echo node1"))
    assert done.out.split()[0] == device, done


@pytest.mark.parametrize("lost", [STEP, ["SLURM_STEP_NODELIST"]], ids=["all", "no_step"])
def test_refuses_to_start_without_srun(lost):
    """A plain `python mnmc_ddp_slurm.py`, and one in a batch script without srun."""
    env = {key: value for key, value in STEP.items() if key not in lost}
    done = forked(SCRIPT, "--device", "cpu", prepare=stop_at_the_process_group, limit=60, **env)
    refused(done, "start this script with srun")


@pytest.mark.parametrize("act", ["requeue", "scancel"])
def test_a_job_of_imagenet_that_slurm_ends_resumes(slurm, small_run, whole, tmp_path, act):
    """Two nodes. It saves before it ends, and the job's next start resumes bit for bit.

    `scontrol requeue` requeues it. After scancel people submit it again.
    """
    out, env = tmp_path / "out", environment(1, **slurm)
    words = ["srun", "--kill-on-bad-exit", sys.executable, "imagenet.py", *small_run, "--out", out]
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{' '.join(map(str, words))}\n")
    command = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--requeue"]
    command += ["-o", tmp_path / "said", script]
    submitted = run(command, 30, env)
    succeeded(submitted)
    job = submitted.out.strip()
    wait_for(out / "log.jsonl", 2)
    succeeded(run(["scontrol", "requeue", job] if act == "requeue" else ["scancel", job], 30, env))
    if act == "scancel":
        wait_until(lambda: not run(["squeue", "-h"], 30, env).out)
        (end,) = records(out / "log.jsonl", "end")
        assert 2 <= end["step"] < 12 and not end["finished"]
        succeeded(run(command, 30, env))
    log = out / "log.jsonl"
    wait_until(lambda: any(r["finished"] for r in records(log, "end", growing=True)), 240)
    starts = records(out / "log.jsonl", "start")
    assert [r["launcher"] for r in starts] == ["srun"] * 2 and starts[1]["resumed"]
    steps = [r["step"] for r in records(out / "log.jsonl", "train")]
    assert steps == [*range(1, 12 + 1)]  # none was lost, none was done again
    assert kills.numbers(out) == whole
