"""`bench run --nodes`: one torchrun on each of several machines, started and ended together."""

import argparse
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace

import hosts
import pytest
from real import EPOCH, data, lacking
from support import ROOT, free_port, succeeded, wait_until

from bench import UserError, backends, cases, process
from bench.cases import Case
from bench.host import Gpu, Host, machine
from bench.nodes import comm, spread
from bench.options import add_flags
from bench.run import command, gate

A100S = Host("C", 16, gpus=(Gpu("A100", (8, 0)),) * 4)
CASE = Case("a case", "mnmc_ddp_launch.py", "torchrun", 2)
LOCAL = ["--remote", "env MACHINE={host}", "--nodes", "localhost,127.0.0.1", "--per-node", "1"]


def flags(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(shlex.split(text))


def test_the_cases_are_of_one_device_one_machine_and_all(monkeypatch):
    monkeypatch.setattr(backends, "absent", lambda case: None)
    host = command.machines(flags("--nodes a,b,c --remote 'on {host}'"), A100S)
    assert machine(host.record()) == "3 machines, each 4 x A100"  # as the table's title says
    rows = {case.name: case for case in cases.chosen(flags("--only snsc,launch"), host)}
    worlds = {case.world: case.nodes(host) for case in rows.values()}
    assert worlds == {1: 1, 4: 1, 8: 2, 12: 3}
    eight = rows["mnmc_ddp_launch.py x8"]
    assert eight.threads(host) == 4  # of the machine's 16 cores, and not of two machines'
    words = eight.command("--epochs", 1, host=host)
    spread_words = ["bench.nodes.spread", "--remote", "on {host}", "--nodes", "a,b", "--port"]
    assert words[2:8] == spread_words
    assert backends.missing(eight, host) is None
    (gathered,) = cases.chosen(flags("--only mp --world 8"), host)[2:]
    assert "only torchrun and srun" in backends.missing(gathered, host)
    (srun,) = cases.chosen(flags("--only slurm --world 8"), host)[2:]
    assert backends.missing(srun, host) is None
    cpus = Host("C", 4, nodes=("a", "b"), remote="on {host}")
    assert "only torchrun is started" in backends.missing(srun, cpus)


@pytest.mark.parametrize("text", ["--nodes here", "--remote 'on {host}'", "--nodes elsewhere,b"])
def test_names_that_cannot_be_used_are_refused(text):
    with pytest.raises(UserError, match="--nodes"):
        command.machines(flags(text), A100S)


def test_the_machines_of_a_job_are_taken(monkeypatch):
    """This one first, wherever Slurm has it in its list."""
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "output", lambda *words: "n1\nn2")
    host = command.machines(flags(""), A100S)
    assert host.nodes == ("n2", "n1")
    assert spread.remote_command(host.remote, "n1")[:3] == ["srun", "--overlap", "-N1"]


def test_a_shell_gets_one_word(tmp_path, monkeypatch):
    """ssh puts a space between its words, and gives them to a shell."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift 2\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    for remote in (f"{ssh} -T {{host}}", "env MACHINE={host}"):
        done = process.run(spread.remote_command(remote, "a"), 20)
        assert done.out == "-m bench.nodes.spread --here\n", done.err


PROGRAM = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
line = f"{os.environ['MACHINE']} {dist.get_rank()} {dist.get_world_size()}\\n"
print(line, end="", flush=True)  # one write, which two ranks cannot mix
if "fail" in sys.argv and dist.get_rank():
    raise ValueError("planted")
time.sleep("wait" in sys.argv and 600)
dist.barrier()
dist.destroy_process_group()
"""


def start(tmp_path, *words: str) -> subprocess.Popen:
    """It, on two machines that are this one."""
    (tmp_path / "program.py").write_text(PROGRAM)
    run = [sys.executable, "-m", "bench.nodes.spread", *LOCAL, "--port", str(free_port())]
    env = process.environment(1) | {process.MARK: process.new_mark()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [*run, "--", str(tmp_path / "program.py"), *words], cwd=ROOT, env=env, **pipes
    )


def test_they_train_together_and_end_together(tmp_path):
    job = start(tmp_path)
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == ["127.0.0.1 1 2", "localhost 0 2"]


@pytest.mark.parametrize("how", ["fail", "wait"])
def test_nothing_is_left_if_one_fails_or_all_are_killed(tmp_path, how):
    job = start(tmp_path, how, "wait")
    try:
        if how == "wait":
            while "2" not in job.stdout.readline():
                pass
            job.send_signal(signal.SIGKILL)
        _, err = job.communicate(timeout=100)
        assert job.returncode == (1 if how == "fail" else -signal.SIGKILL)
        if how == "fail":
            assert "spread: error: 127.0.0.1: exit code 1" in err
        deadline = time.monotonic() + 30
        while process.marked(process.OWNER) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not process.marked(process.OWNER)
    finally:
        process.end(process.OWNER)


@pytest.mark.full
def test_two_hosts_pass_the_gate():
    """Two ranks, one on each, train what the oracle trains, started by ssh. A machine that is not
    there is named, as in a row of the table.
    """
    if reason := hosts.lacking():
        lacking(reason)
    with hosts.lab("--debian") as lab:
        host = Host("C", 1, nodes=("hosta", "hostb", "hostz"), remote=lab.remote())
        two, three = (replace(CASE, world=world, batch=24) for world in (2, 3))
        words = ["--dataset", "fashion-mnist", "--arch", "shufflenet_v2_x0_5"]
        (outcome,) = gate.train_cases([two], words, host, print).values()
        found = gate.judge(two, *outcome, host)
        assert found["passed"] and found["distance"] < 1e-6, found
        with pytest.raises(process.Failed, match="hostz"):
            process.launch(three.command(*words, host=host), process.environment(1), 60)


IN_A_JOB = """
import argparse, sys
from bench import process
from bench.cases import Case
from bench.host import Host
from bench.run import command

host = command.machines(argparse.Namespace(nodes=None, remote=None), Host("C", 1))
case = Case("a case", "mnmc_ddp_launch.py", "torchrun", 2, batch=64)
lines = process.launch(case.command(*sys.argv[1:], host=host), process.environment(1), 180)
print(host.nodes, lines[0]["world_size"], lines[-1]["event"])
"""


@pytest.mark.full
def test_in_a_slurm_job_of_two_nodes(slurm, tmp_path):
    """A case of `bench run` trains on both, started by srun; so does `bench comm`. The job may have
    more tasks a node than these, and fewer cores than the machine.
    """
    (tmp_path / "case.py").write_text(IN_A_JOB)
    path, out = tmp_path / "comm.jsonl", tmp_path / "out"
    each = f"srun --ntasks-per-node=1 {sys.executable} -m bench comm --seconds 6 --out {path}"
    train = shlex.join(map(str, [sys.executable, tmp_path / "case.py", *EPOCH, "--data", data()]))
    script = f"#!/bin/sh\n{each} && {train}\n"
    (tmp_path / "job.sh").write_text(script)
    env = process.environment(1, **slurm, PYTHONPATH=str(ROOT))
    words = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=2", "-o", out, tmp_path / "job.sh"]
    submitted = process.run(words, 30, env)
    succeeded(submitted)
    job = submitted.out.strip()
    try:
        wait_until(lambda: not process.run(["squeue", "-h", "-j", job], 20, env).out, 240)
    finally:
        process.run(["scancel", job], 20, env)
    assert out.read_text().splitlines()[-1] == "('node1', 'node2') 2 end", out.read_text()
    assert comm.read(path)[0]["nodes"] == 2
