"""Sets up what --with names; what cannot be is said in a line."""

import importlib
import os
import tempfile

from bench import ROOT
from bench.backends import has
from bench.host import output
from bench.process import run


def start_slurm(stack) -> str | None:
    """A two-node Slurm on this machine, for as long as the stack is open; needs root."""
    if has("srun") and output("sinfo", "-h", limit=10):
        return None  # a real one
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ladder-slurm-"))
    up = ["bash", ROOT / "bench" / "slurm" / "up.sh", "--install", folder]
    stack.callback(run, ["bash", ROOT / "bench" / "slurm" / "down.sh", folder], 60)
    done = run(up, 600)
    if done.code:
        return done.last_line
    os.environ["SLURM_CONF"] = done.out.strip().split("SLURM_CONF=")[1]
    return None


def install(name: str) -> str | None:
    """Runs bench/install_NAME.sh, for the Python that PYTHON names; why it failed, if it did.

    apex: the Python part of the last Apex that has amp, from source. horovod: built for the
    installed torch, minutes the first time. techniques: Accelerate, Fabric, DeepSpeed, DALI.
    """
    done = run(["bash", ROOT / "bench" / f"install_{name}.sh"], 1800)
    importlib.invalidate_caches()
    return done.last_line if done.code else None


def provide(names: list[str], stack, say) -> None:
    """Sets up some of options.EXTRAS; say gets a line where one could not be."""
    for name in names:
        say(f"setting up {name}")
        if reason := start_slurm(stack) if name == "slurm" else install(name):
            say(f"--with {name}: {reason}")
