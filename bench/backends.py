"""Finds what is installed, and which version; what is not, why, and how to get it."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from bench.cases import Case
from bench.host import SHARED, Host, output, versions
from bench.ladder import SCRIPTS
from bench.options import EXTRAS

PROBE = 20  # seconds that a job of nothing may wait for a node
ELSEWHERE = 33  # its exit code on another machine


def has(program: str) -> bool:
    """Whether a program is on PATH, or beside the Python that runs this."""
    return bool(shutil.which(program) or (Path(sys.executable).parent / program).exists())


def missing(case: Case, host: Host) -> str | None:
    """Why a case cannot run on this machine, in words for the table; None where it can."""
    if (nodes := case.nodes(host)) > 1:
        if nodes > len(host.nodes) or case.world % nodes:
            return f"needs {case.world} devices, {len(host.nodes)} x {host.devices} here"
        if case.launcher not in ("torchrun", "srun"):
            return "over several machines, only torchrun and srun are started"
        if case.launcher == "srun" and not host.gpus:  # process.environment keeps Gloo on loopback
            return "over several machines without GPUs, only torchrun is started"
    elif host.gpus and case.world > len(host.gpus):
        return f"needs {case.world} GPUs, {len(host.gpus)} here"
    elif not host.gpus and case.world > host.cores:
        return f"needs {case.world} cores, {host.cores} here"
    if case.script == "snmc_dp.py" and not host.gpus:
        return "on a CPU, DataParallel only calls the model"
    if case.technique == "bf16" and host.gpus and host.gpus[0].capability < (8, 0):
        return "this GPU has no bf16, PyTorch would emulate it"
    if case.technique == "fp16" and not host.gpus and "asimdhp" not in host.cpu_flags:
        # Fifty times as long on a CPU with avx512_fp16; asimdhp is the fp16 of ARM.
        return "on this CPU, PyTorch takes many times as long in fp16 as in fp32"
    if case.technique == "compiled" and not shutil.which(os.environ.get("CXX", "g++")):
        return "g++ not found: torch.compile needs a C++ compiler, install one or set CXX"
    reason = absent(case)
    if case.script == "mnmc_apex.py" and not host.gpus:
        return reason or "apex.amp and apex.parallel need a GPU"
    return reason


def absent(case: Case) -> str | None:
    """Which backend a case lacks, and the cure; None where it is there."""
    if case.launcher == "srun":
        return no_slurm()
    name = SCRIPTS[case.script].library if case.script in SCRIPTS else ""
    if name and not (installed(name) and (name != "horovod" or has("horovodrun"))):
        extra = name if name in EXTRAS else "techniques"
        return f"{name} not installed: --with {extra} installs it"
    return no_apex() if name == "apex" else None


def lacking(rows: list[Case], host: Host) -> list[str]:
    """A line for each thing that keeps cases from running here: what it is, the cure, the cases."""
    found: dict[str, list[str]] = {}
    for case in rows:
        if reason := missing(case, host):
            found.setdefault(reason, []).append(case.name)
    return [f"{reason} ({', '.join(names)})" for reason, names in found.items()]


@cache
def no_slurm() -> str | None:
    """Whether Slurm is there, and starts a job of ours on this machine that sees our files."""
    if not has("srun"):
        return "srun not found: no Slurm here, --with slurm starts a small one"
    if not output("sinfo", "-h", limit=10):
        return "Slurm's sinfo shows no node: --with slurm starts a small one"
    SHARED.mkdir(parents=True, exist_ok=True)
    boot = Path("/proc/sys/kernel/random/boot_id")  # of this machine, not of its containers
    sees = f"test -d {shlex.quote(str(SHARED))} -a -x {shlex.quote(sys.executable)} || exit 1; "
    sees += f"grep -qx {boot.read_text().strip()} {boot} || exit {ELSEWHERE}"
    inside = ["--overlap"] if "SLURM_JOB_ID" in os.environ else []
    probe = ["srun", f"--immediate={PROBE}", "-N1", "-n1", *inside, "sh", "-c", sees]
    try:
        asked = subprocess.run(probe, capture_output=True, text=True, timeout=2 * PROBE)
    except subprocess.TimeoutExpired:
        return f"srun gets no node within {2 * PROBE:g} s: start this within a job, as by salloc"
    if asked.returncode == 0:
        return None
    said = [line for line in asked.stderr.splitlines() if "error: " in line]
    if said and f"Exited with exit code {ELSEWHERE}" in said[0]:
        return "srun starts on another machine, which has another speed: run this in a job"
    if not said or "Exited with exit code 1" in said[0]:  # that of `test`
        return "a node of Slurm does not see this folder or this Python: put both on a shared disk"
    reason = said[0].split("error: ", 1)[1]
    return f"srun: {reason}: start this within a job, or set SLURM_PARTITION or SLURM_ACCOUNT"


@cache
def no_apex() -> str | None:
    """Whether the package of that name is NVIDIA's, and has what the script needs."""
    code = "from apex import amp; from apex.parallel import DistributedDataParallel"
    if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode:
        return "this apex has no apex.amp and apex.parallel: docs/howto/install.md says how"
    return None


def installed(name: str) -> bool:
    """Whether a module can be found; "package.module" may be part of a package."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package is not installed
        return False


def carrier(case: Case, host: Host) -> str:
    """What carries a case's messages, with versions and build flags; "" where it cannot run."""
    if missing(case, host):
        return ""
    found = versions()
    nccl = ["nccl", *(found[name] for name in found if name.startswith("nvidia-nccl"))]
    torchs = " ".join([*(nccl if host.gpus else ["gloo"]), "of torch", found["torch"]])
    if case.script == "snmc_dp.py":
        return "copies between devices"
    if case.launcher == "srun":
        return f"{output('srun', '--version')}, {torchs}"
    if case.script == "mnmc_apex.py":
        kernels = "" if importlib.util.find_spec("amp_C") else " without its CUDA kernels"
        return f"apex {found.get('apex', '?')}{kernels}, {torchs}"
    if case.launcher == "horovodrun":
        return f"horovod {found['horovod']} built with {horovod_has()}"
    return torchs if case.launcher == "torchrun" or case.script == "mnmc_ddp_mp.py" else "none"


@cache
def horovod_has() -> str:
    """What the installed Horovod was built with."""
    code = "import horovod.torch as h; print(*(n for n in ('nccl', 'mpi', 'gloo', 'cuda') "
    code += "if getattr(h, n + '_built')()))"
    return ", ".join(output(sys.executable, "-c", code).split())
