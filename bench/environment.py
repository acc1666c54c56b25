"""Where a result was measured: versions, hardware, load; none of it needs torch imported."""

import importlib.metadata as metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from bench.launch import ROOT

PACKAGES = [
    "torch",
    "torchvision",
    "horovod",
    "apex",
    "numpy",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
]
# Dense peak TFLOP/s of one GPU by precision, from NVIDIA's data sheets; the longest name that fits.
PEAKS = {
    "V100": {"fp32": 15.7, "fp16": 125},
    "V100-PCIE": {"fp32": 14, "fp16": 112},
    "T4": {"fp32": 8.1, "fp16": 65},
    "A10": {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125},
    "A100": {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312},
    "L4": {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121},
    "L40": {"fp32": 90.5, "tf32": 90.5, "fp16": 181, "bf16": 181},
    "L40S": {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362},
    "H100 PCIe": {"fp32": 51, "tf32": 378, "fp16": 756, "bf16": 756},
    "H100 NVL": {"fp32": 60, "tf32": 418, "fp16": 835, "bf16": 835},
    "H100": {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989},
    "H200": {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989},
}
VOLATILE = ("SLURM_CONF",)  # a test Slurm's folder: another name at every start
VARIABLES = (
    "CUDA_",
    "NVIDIA_TF32",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "MALLOC_",
    "TORCH",
    "PYTORCH",
    "HOROVOD_",
    "SLURM_",
)


def output(*command: str) -> str:
    """What a command prints, or "" where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def asking(query: str, visible: str | None) -> list[str]:
    """The command that asks nvidia-smi about these GPUs (CUDA_VISIBLE_DEVICES), or about all."""
    only = [f"--id={visible}"] if visible else []
    return ["nvidia-smi", *only, f"--query-gpu={query}", "--format=csv,noheader,nounits"]


@cache
def gpus() -> list[str]:
    """The names of the GPUs that a child of this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return []
    names = output(*asking("name", visible)).splitlines()
    if visible and not names:  # parts of a GPU (MIG) have names that it does not take
        names = output(*asking("name", None)).splitlines()[: visible.count(",") + 1]
    return names


@cache
def tf32() -> bool:
    """Whether these GPUs have TF32, which torch then uses for convolutions: since Ampere, 8.0."""
    found = output(*asking("compute_cap", None)).split()
    allowed = os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
    return bool(allowed and gpus() and found) and float(found[0]) >= 8


def cores() -> int:
    """The CPU cores that this process may use: its affinity, and its cgroup's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such cgroup, or "max"
        pass
    return count or 1


def cpu_name() -> str:
    """The processor's name as it gives it, without the words that every name has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return name.replace("(R)", "").replace("(TM)", "").split(" CPU")[0].split(" @")[0]


def cpu_has(*words: str) -> bool:
    """Whether a feature of the processor, as Linux lists them, has one of these in its name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return any(word in line for word in words)


def peak(environment: dict, precision: str) -> float | None:
    """FLOP/s of one GPU of this machine at a precision; None where it is not known."""
    gpu = environment["gpus"][0] if environment["gpus"] else ""
    names = [name for name in PEAKS if re.search(rf"\b{name}\b", gpu)]  # an L40 is no L4
    tera = PEAKS[max(names, key=len)].get(precision) if names else None
    return tera * 1e12 if tera else None


def limits() -> dict:
    """What this process may use: its cores by number, and its cgroup's limits where it has any."""
    found = {}
    if hasattr(os, "sched_getaffinity"):
        found["affinity"] = sorted(os.sched_getaffinity(0))
    for name in ("cpu.max", "memory.max", "cpuset.cpus.effective"):
        try:
            found[name] = Path("/sys/fs/cgroup", name).read_text().strip()
        except OSError:
            pass
    return found


def differences(old: dict, new: dict) -> list[str]:
    """What differs between two environments, each "key: old -> new"; VOLATILE ones do not count."""
    found = []
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += [f"{key} {line}" for line in differences(a, b)]
        elif a != b and key not in VOLATILE:
            found.append(f"{key}: {a} -> {b}")
    return found


def versions() -> dict[str, str]:
    """The installed versions of PACKAGES, and Python's."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def collect() -> dict:
    """All that may explain a speed, as plain JSON values."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    result = {
        "cpu": cpu_name(),
        "cores": cores(),
        "memory_gib": round(memory, 1),
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "limits": limits(),
        "versions": versions(),
        "git_commit": output("git", "rev-parse", "HEAD"),
        "git_clean": not output("git", "status", "--porcelain", "--untracked-files=no"),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
        "executable": "active Python" if ROOT not in Path(sys.executable).parents else ".venv",
    }
    if gpus():
        result["driver"] = output(*asking("driver_version", None)).split("\n")[0]
        result["topology"] = output("nvidia-smi", "topo", "-m")
    return result


def machine(environment: dict) -> str:
    """One line for captions: "2 cores of AMD EPYC" or "4 x Tesla V100-SXM2-16GB"."""
    names = environment["gpus"]
    if names:
        return f"{len(names)} x {names[0]}"
    return f"{environment['cores']} cores of {environment['cpu']}"


def has(program: str) -> bool:
    """Whether a program is on PATH, or beside the Python that runs this."""
    return bool(shutil.which(program) or (Path(sys.executable).parent / program).exists())
