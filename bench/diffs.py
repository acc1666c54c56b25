"""The diffs of the ladder and its techniques: what each of them costs in code."""

import subprocess

from bench import ROOT

# from, to, and the most added and removed lines that it may cost: today's, so that more are seen
PAIRS = [
    ("snsc.py", "snmc_dp.py", 8, 4),
    ("snsc.py", "mnmc_ddp_launch.py", 111, 30),
    ("mnmc_ddp_launch.py", "mnmc_ddp_mp.py", 38, 16),
    ("mnmc_ddp_launch.py", "mnmc_ddp_slurm.py", 26, 13),
    ("mnmc_ddp_launch.py", "mnmc_apex.py", 22, 16),
    ("mnmc_ddp_launch.py", "mnmc_horovod.py", 33, 38),
    ("snsc.py", "techniques/grad_accum.py", 13, 7),
    ("mnmc_ddp_launch.py", "techniques/amp.py", 15, 10),
    ("mnmc_ddp_launch.py", "techniques/channels_last.py", 4, 6),
    ("mnmc_ddp_launch.py", "techniques/compile.py", 6, 5),
]


def diff(old: str, new: str) -> str:
    """`diff -u OLD NEW`, without time stamps."""
    command = ["diff", "-u", "--label", old, "--label", new, old, new]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode > 1:
        raise RuntimeError(done.stderr)
    return done.stdout


def counts(text: str) -> tuple[int, int]:
    """The added and the removed lines of a unified diff."""
    lines = text.splitlines()[2:]  # without the two lines that name the files
    return sum(x.startswith("+") for x in lines), sum(x.startswith("-") for x in lines)
