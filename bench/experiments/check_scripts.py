"""Trains every script for some steps, and compares each with the oracle, as a gate does."""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench import backends, cases, process, records
from bench.cases import Case
from bench.host import Host, free_mib, free_port
from bench.ladder import MICRO, SCRIPTS, TECHNIQUES, TIMED
from bench.options import add_flags
from bench.run import gate

STEPS = 20  # of each script in the part `scripts`
BATCH = 128  # global, of these
EACH_MIB = 2_500  # of a GPU's memory, for one of these: its tensors, and CUDA's own
LAUNCH = 25.0  # seconds that one of these may take when it runs by itself
# srun would set these for the only task of a job's first step.
ONE_TASK = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "1"}
ONE_TASK |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_ADDR": "127.0.0.1"}
# Models of the techniques that train only transformers. vit_tiny is their own; the oracle has none.
TRANSFORMER, FEW = ("vit_b_16", "224"), 16  # --arch and --image-size; images per step
# Scripts that have no row in a table of techniques: their flags, and those of their oracle.
UNTIMED = {"techniques/grad_accum.py": (("--accum-steps", "4"), MICRO)}
TWO = {  # what does not start with one
    "techniques/model_parallel.py": "GPUs",
    "techniques/parameter_server.py": "processes: a server and a worker",
}
ALONE = {  # flags without which one process is too few
    "techniques/parallel_2d.py": ("--tensor-parallel", "1"),
    "techniques/parallel_3d.py": ("--tensor-parallel", "1", "--pipeline-parallel", "1"),
}


def every_script(host: Host) -> list[Case]:
    """A case of each script and of each way to use it, on all GPUs up to four, or on two cores."""
    world = min(4, len(host.gpus)) if host.gpus else min(2, host.cores)
    rows = [case for case in cases.cases(host, [world]) if case.name != cases.AGAIN]
    for name, (script, how) in TIMED.items():
        if script.path in SCRIPTS and name != "fp32":
            about = {"technique": name, "flags": how.flags, "variables": how.variables}
            rows.append(Case(name, script.path, script.launcher, world, script.split, **about))
    for script in TECHNIQUES:
        if not script.timed and script.launcher != "oneflow":  # it runs without torch
            size = world if script.processes else 1
            name, (flags, _) = script.path, UNTIMED.get(script.path, ((), ()))
            rows.append(Case(name, name, script.launcher, size, script.split, flags=flags))
    if world == 1:
        rows = [replace(row, flags=row.flags + ALONE.get(row.script, ())) for row in rows]
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = parser.parse_args(["--scaling", "strong", "--batch-size", str(BATCH)])
    rows = cases.scaled(rows, flags, host)
    rows = [replace(row, workers=0) for row in rows]  # these images are in memory
    return [replace(row, batch=FEW) if SCRIPTS[row.script].arch else row for row in rows]


def at_once(host: Host) -> int:
    """How many scripts run at the same time: they are not timed."""
    most = max(1, min(6, host.cores // 2))
    return max(1, min(most, int(free_mib(host) // EACH_MIB))) if host.gpus else most


def why_not(case: Case, host: Host) -> str | None:
    """Why a case cannot run here; mnmc_ddp_slurm.py runs without Slurm where it is one process."""
    if case.launcher == "srun" and case.world == 1:
        return None
    if case.world == 1 and case.script in TWO:
        return f"needs two {TWO[case.script]}"
    if case.world == 1 and case.technique in ("interleaved", "zero-bubble"):
        return "needs two stages, each on a GPU of its own"
    return backends.missing(case, host)


def check(out: Path, host: Host, left: Callable[[], float], say: Callable[[str], None]) -> bool:
    """Every script for some steps, several at a time, and a line of each in a file of JSON lines.

    left: says how many seconds are left. Returns whether every script has its line; those that
    passed already are not run again.
    """
    every = every_script(host)
    last = {line["case"]: line for line in records.lines(out)[0]}
    passed = {name for name, line in last.items() if line.get("passed")}
    rows = [case for case in every if case.name not in passed]
    most = at_once(host)
    write_lock, ending = threading.Lock(), threading.Event()

    def compare(case: Case) -> None:
        """One script's line: its gate's record, or why it did not run."""
        begun, found = time.monotonic(), {"case": case.name, "script": case.script}
        if left() < LAUNCH:
            return  # for the next call
        if reason := why_not(case, host):
            found |= {"skipped": reason}
            if last.get(case.name) == found:
                return
        else:
            mine, exact = (
                training.run(job, max(0.0, min(LAUNCH * most, left()))) for job in jobs(case, host)
            )
            cut = ending.is_set() or left() <= 0
            if cut and any(isinstance(x, Exception) for x in (mine, exact)):
                return
            found |= gate.judge(case, *gate.measure_pair(mine, exact), host)
            found |= {"world": case.world, "seconds": round(time.monotonic() - begun, 1)}
        with write_lock, open(out, "a") as file:
            file.write(json.dumps(found, default=str) + "\n")
        verdict = found.get("skipped") or found["reason"] or f"passed, {found['distance']:.1e} off"
        say(f"  {case.name}: {verdict}")

    with tempfile.TemporaryDirectory() as folder:
        training = gate.Training(folder)
        process.side_by_side(compare, rows, most, ending)
    return {line["case"] for line in records.lines(out)[0]} >= {case.name for case in every}


def jobs(case: Case, host: Host) -> tuple[tuple, tuple]:
    """A case's command and its oracle's, as a gate makes them, for STEPS steps."""
    arch, size = TRANSFORMER if SCRIPTS[case.script].arch else ("resnet18", "32")
    flags = ["--dataset", "fashion-mnist", "--data", "data", "--arch", arch, "--image-size", size]
    mine, exact = gate.make_jobs(case, flags, host, STEPS)
    exact = (*exact[0], *UNTIMED.get(case.script, ((), ()))[1]), exact[1]
    # Several run at once, and threads of several programs on one core wait for each other.
    threads = {"OMP_NUM_THREADS": str(max(1, host.cores // at_once(host)))} if host.gpus else {}
    mine, exact = (
        (words, tuple(sorted((dict(e) | threads).items()))) for words, e in (mine, exact)
    )
    if case.launcher == "srun" and case.world == 1:
        command, env = mine
        env = dict(env) | ONE_TASK | {"MASTER_PORT": str(free_port())}
        mine = command[command.index(sys.executable) :], tuple(sorted(env.items()))
    return mine, exact
