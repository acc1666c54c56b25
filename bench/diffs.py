"""The diffs of the ladder and its techniques: what each of them costs in code."""

import subprocess

from bench import ROOT

# from, to, and the most added and removed lines that it may cost: today's, so that more are seen
PAIRS = [
    ("snsc.py", "snmc_dp.py", 9, 6),
    ("snsc.py", "mnmc_ddp_launch.py", 77, 26),
    ("mnmc_ddp_launch.py", "mnmc_ddp_mp.py", 24, 8),
    ("mnmc_ddp_launch.py", "mnmc_ddp_slurm.py", 22, 13),
    ("mnmc_ddp_launch.py", "mnmc_apex.py", 19, 12),
    ("mnmc_ddp_launch.py", "mnmc_horovod.py", 29, 34),
    ("snsc.py", "techniques/grad_accum.py", 16, 10),
    ("mnmc_ddp_launch.py", "techniques/amp.py", 30, 12),
    ("mnmc_ddp_launch.py", "techniques/channels_last.py", 19, 6),
    ("mnmc_ddp_launch.py", "techniques/compile.py", 9, 5),
    ("mnmc_ddp_launch.py", "techniques/elastic.py", 49, 11),
    ("mnmc_ddp_launch.py", "techniques/invariant.py", 83, 34),
    ("mnmc_ddp_launch.py", "techniques/comm_hooks.py", 47, 6),
    ("mnmc_ddp_launch.py", "techniques/local_sgd.py", 27, 15),
    ("mnmc_ddp_launch.py", "techniques/ring_allreduce.py", 57, 14),
    ("mnmc_ddp_launch.py", "techniques/accelerate_ddp.py", 31, 28),
    ("mnmc_ddp_launch.py", "techniques/deepspeed_zero.py", 66, 23),
    ("mnmc_ddp_launch.py", "techniques/fabric_ddp.py", 26, 21),
    ("mnmc_ddp_launch.py", "techniques/dali.py", 75, 22),
    ("mnmc_ddp_launch.py", "techniques/syncbn.py", 62, 10),
    ("mnmc_ddp_launch.py", "techniques/custom_optimizer.py", 101, 15),
    ("mnmc_ddp_launch.py", "techniques/heterogeneous.py", 88, 22),
    ("mnmc_ddp_launch.py", "techniques/no_sync.py", 26, 10),
    ("mnmc_ddp_launch.py", "techniques/distributed_eval.py", 58, 11),
    ("mnmc_ddp_launch.py", "techniques/uneven_inputs.py", 103, 37),
    ("mnmc_ddp_launch.py", "techniques/zero1.py", 17, 8),
    ("mnmc_ddp_launch.py", "techniques/fsdp.py", 75, 21),
    ("mnmc_ddp_launch.py", "techniques/activation_checkpointing.py", 52, 5),
]


def diff(old: str, new: str, minimal: bool = False) -> str:
    """`diff -u OLD NEW`, without time stamps; minimal: with no line more than it needs."""
    command = ["diff", "-u", *["--minimal"] * minimal, "--label", old, "--label", new, old, new]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode > 1:
        raise RuntimeError(done.stderr)
    return done.stdout


def counts(text: str) -> tuple[int, int]:
    """The added and the removed lines of a unified diff."""
    lines = text.splitlines()[2:]  # without the two lines that name the files
    return sum(x.startswith("+") for x in lines), sum(x.startswith("-") for x in lines)
