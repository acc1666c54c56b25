"""The diffs of the ladder and its techniques: what each of them costs in code."""

import difflib

from bench.launch import ROOT

# from, to, and the most added and removed lines that it may cost
PAIRS = [
    ("snsc.py", "snmc_dp.py", 4, 4),
    ("snsc.py", "mnmc_ddp_launch.py", 20, 12),
    ("mnmc_ddp_launch.py", "mnmc_ddp_mp.py", 20, 10),
    ("mnmc_ddp_launch.py", "mnmc_ddp_slurm.py", 16, 8),
    ("mnmc_ddp_launch.py", "mnmc_apex.py", 20, 10),
    ("snsc.py", "mnmc_horovod.py", 24, 12),
    ("snsc.py", "techniques/grad_accum.py", 40, 20),
    ("mnmc_ddp_launch.py", "techniques/amp.py", 12, 8),
    ("mnmc_ddp_launch.py", "techniques/channels_last.py", 4, 4),
    ("mnmc_ddp_launch.py", "techniques/compile.py", 6, 2),
]


def diff(old: str, new: str) -> str:
    """`diff -u OLD NEW`, without time stamps."""
    sides = [(ROOT / name).read_text().splitlines(keepends=True) for name in (old, new)]
    return "".join(difflib.unified_diff(*sides, old, new))


def counts(text: str) -> tuple[int, int]:
    """The added and the removed lines of a unified diff."""
    lines = text.splitlines()[2:]  # without the two lines that name the files
    return sum(x.startswith("+") for x in lines), sum(x.startswith("-") for x in lines)
