"""The diffs of the ladder and its techniques: what each of them costs in code."""

import subprocess

from bench import ROOT

# from, to, and the most added and removed lines that it may cost: today's, so that more are seen
PAIRS = [
    ("snsc.py", "snmc_dp.py", 8, 4),
    ("snsc.py", "mnmc_ddp_launch.py", 114, 30),
    ("mnmc_ddp_launch.py", "mnmc_ddp_mp.py", 38, 16),
    ("mnmc_ddp_launch.py", "mnmc_ddp_slurm.py", 26, 13),
    ("mnmc_ddp_launch.py", "mnmc_apex.py", 22, 16),
    ("mnmc_ddp_launch.py", "mnmc_horovod.py", 33, 41),
    ("snsc.py", "techniques/grad_accum.py", 14, 7),
    ("mnmc_ddp_launch.py", "techniques/amp.py", 17, 9),
    ("mnmc_ddp_launch.py", "techniques/channels_last.py", 4, 6),
    ("mnmc_ddp_launch.py", "techniques/compile.py", 6, 5),
    ("mnmc_ddp_launch.py", "techniques/elastic.py", 106, 18),
    ("mnmc_ddp_launch.py", "techniques/invariant.py", 94, 42),
    ("mnmc_ddp_launch.py", "techniques/comm_hooks.py", 63, 6),
    ("mnmc_ddp_launch.py", "techniques/local_sgd.py", 31, 21),
    ("mnmc_ddp_launch.py", "techniques/ring_allreduce.py", 89, 22),
    ("mnmc_ddp_launch.py", "techniques/accelerate_ddp.py", 34, 36),
    ("mnmc_ddp_launch.py", "techniques/deepspeed_zero.py", 59, 30),
    ("mnmc_ddp_launch.py", "techniques/fabric_ddp.py", 29, 30),
    ("mnmc_ddp_launch.py", "techniques/syncbn.py", 58, 12),
    ("mnmc_ddp_launch.py", "techniques/custom_optimizer.py", 65, 8),
    ("mnmc_ddp_launch.py", "techniques/heterogeneous.py", 93, 22),
    ("mnmc_ddp_launch.py", "techniques/no_sync.py", 24, 13),
    ("mnmc_ddp_launch.py", "techniques/distributed_eval.py", 48, 11),
    ("mnmc_ddp_launch.py", "techniques/uneven_inputs.py", 116, 44),
    ("mnmc_ddp_launch.py", "techniques/zero1.py", 31, 9),
    ("mnmc_ddp_launch.py", "techniques/fsdp.py", 75, 25),
    ("mnmc_ddp_launch.py", "techniques/activation_checkpointing.py", 95, 6),
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
