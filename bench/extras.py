"""--with: sets up what a backend needs and this machine lacks; what cannot be is said in a line."""

import importlib
import os
import tempfile

from bench import ROOT
from bench.backends import has
from bench.process import run

NAMES = ("slurm", "horovod", "apex", "techniques")


def slurm(stack) -> str | None:
    """A two-node Slurm on this machine, for as long as the stack is open; needs root."""
    if has("srun") and run(["sinfo", "-h"], 10).out.strip():
        return None  # a real one
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ladder-slurm-"))
    up = ["bash", ROOT / "bench" / "slurm" / "up.sh", "--install", folder]
    stack.callback(run, ["bash", ROOT / "bench" / "slurm" / "down.sh", folder], 60)
    done = run(up, 600)
    if done.code:
        return done.last_line
    os.environ["SLURM_CONF"] = done.out.strip().split("SLURM_CONF=")[1]
    return None


def horovod(stack) -> str | None:
    """Horovod, built for the installed torch; minutes the first time."""
    return install("install_horovod.sh")


def apex(stack) -> str | None:
    """The last Apex that has amp, its Python part; from source, by git."""
    return install("install_apex.sh")


def techniques(stack) -> str | None:
    """The libraries of techniques/: Accelerate, Lightning Fabric, DeepSpeed, DALI."""
    return install("install_techniques.sh")


def install(script: str) -> str | None:
    """Runs an installer of bench/, for the Python that PYTHON names."""
    done = run(["bash", ROOT / "bench" / script], 1800)
    importlib.invalidate_caches()
    return done.last_line if done.code else None


def provide(names: list[str], stack, say) -> None:
    """Sets each up; say gets a line where one could not be."""
    known = {"slurm": slurm, "horovod": horovod, "apex": apex, "techniques": techniques}
    for name in names:
        say(f"setting up {name}")
        if reason := known[name](stack):
            say(f"--with {name}: {reason}")
