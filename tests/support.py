"""What the tests share: the scripts, run as processes of their own and always cleaned up."""

import json
import sys
from pathlib import Path

from bench.launch import ROOT, Finished, environment, run

LADDER = [
    "snsc",
    "snmc_dp",
    "mnmc_ddp_launch",
    "mnmc_ddp_mp",
    "mnmc_ddp_slurm",
    "mnmc_apex",
    "mnmc_horovod",
]
SHARED = ROOT.parent / "shared"  # real images, where they are there; never a part of the project


def python(script: str | Path, *flags, limit: float = 120, threads: int = 1, **env) -> Finished:
    """A script in one process (mnmc_ddp_mp.py starts its own)."""
    return run([sys.executable, script, *flags], limit, environment(threads, **env))


def torchrun(nproc: int, script: str | Path, *flags, limit: float = 180, **env) -> Finished:
    """A script under torchrun on this machine, one thread a process."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", nproc, script, *flags]
    return run(command, limit, environment(1, **env))


def records(path: Path, event: str | None = None) -> list[dict]:
    """The records of a --log-json file, all of them or those of one event."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if event in (None, line["event"])]
