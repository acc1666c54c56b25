"""Finds what this machine is: asked once by `look`, and handed to all that need it.

`python -m bench.host` prints the GPUs as torch sees them: a program of its own, since it imports
torch, which the harness does not. NVML (nvidia-ml-py) is asked only for what torch cannot say.
"""

import importlib.metadata as metadata
import itertools
import json
import math
import os
import platform
import random
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench import ROOT

PACKAGES = ["torch", "torchvision", "horovod", "apex", "numpy"]
PACKAGES += ["nvidia-nccl-cu13", "nvidia-nccl-cu12"]
# Of the environment these alone are recorded, since each may explain a speed. A list of what may be
# told, not of what may not: Slurm, a cloud or a user puts tokens, names and addresses beside them.
RECORDED_VARIABLES = tuple(
    """
    CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING
    CUDA_MODULE_LOADING CUDA_VISIBLE_DEVICES GLOO_SOCKET_IFNAME GOMP_CPU_AFFINITY
    HOROVOD_AUTOTUNE HOROVOD_BATCH_D2D_MEMCOPIES HOROVOD_CACHE_CAPACITY HOROVOD_CYCLE_TIME
    HOROVOD_FUSION_THRESHOLD HOROVOD_HIERARCHICAL_ALLREDUCE HOROVOD_NUM_NCCL_STREAMS
    HOROVOD_THREAD_AFFINITY KMP_AFFINITY KMP_BLOCKTIME KMP_HW_SUBSET MALLOC_ARENA_MAX
    MALLOC_MMAP_THRESHOLD_ MALLOC_TOP_PAD_ MALLOC_TRIM_THRESHOLD_ MKL_CBWR MKL_DYNAMIC
    MKL_ENABLE_INSTRUCTIONS MKL_NUM_THREADS NCCL_ALGO NCCL_BLOCKING_WAIT NCCL_BUFFSIZE
    NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_DEBUG NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA
    NCCL_LAUNCH_MODE NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS NCCL_NET NCCL_NET_GDR_LEVEL
    NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL
    NCCL_PROTO NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS NVIDIA_TF32_OVERRIDE
    OMP_DISPLAY_ENV OMP_DYNAMIC OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND OMP_SCHEDULE
    OMP_WAIT_POLICY ONEDNN_MAX_CPU_ISA PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
    PYTORCH_NO_CUDA_MEMORY_CACHING SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE SLURM_JOB_NUM_NODES
    SLURM_NTASKS TORCHINDUCTOR_FREEZING TORCHINDUCTOR_MAX_AUTOTUNE
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_CUDNN_V8_API_DISABLED TORCH_DISTRIBUTED_DEBUG
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT
    TORCH_NCCL_HIGH_PRIORITY
    """.split()
)
SHARED = ROOT / ".cache" / "logs"  # of what runs on other nodes: they see the project's folder
REMOTE = "ssh -T {host}"  # how a command starts on another machine
PORT = "a free port"  # as a word of a command or a variable: process.run puts one there
# Below the ports that the system gives to connections by itself, from 32768 on, and those of our
# small Slurm (bench/slurm/up.sh) and of jobs under the real one (mnmc_ddp_slurm.py). All of them in
# an order of this process's own, over and over.
PORTS = itertools.cycle(random.Random().sample(range(5_000, 10_000), 5_000))


@dataclass(frozen=True)
class Gpu:
    """One GPU, as a process of ours sees it."""

    name: str
    capability: tuple[int, int] = (0, 0)  # 8, 0 is an A100's
    free_mib: float = 0.0  # at the start
    uuid: str = ""  # NVML's name for it


@dataclass(frozen=True)
class Host:
    """A machine. Tests make their own: Host("a CPU", 64, gpus=(Gpu("Tesla V100"),) * 8)."""

    cpu: str
    cores: int  # that this process may use
    memory_gib: float = 0.0
    cpu_flags: frozenset[str] = frozenset()  # the processor's features, as Linux names them
    gpus: tuple[Gpu, ...] = ()  # that a child of this process may use
    unusable: tuple[str, ...] = ()  # GPUs that the driver shows, where torch can use none
    driver: str = ""  # of the GPUs
    topology: str = ""  # how they are connected
    tf32_allowed: bool = True  # by NVIDIA_TF32_OVERRIDE
    slurm_gpus: bool = False  # whether Slurm hands GPUs out; else it leaves them to the job
    slurm_job: bool = False  # whether this runs within a job, whose cores the cases then share
    nodes: tuple[str, ...] = ()  # the machines, where there are several: equal ones, this one first
    remote: str = ""  # how a command starts on one of them: nodes/spread.py
    system: str = ""
    limits: dict = field(default_factory=dict)  # cores by number, and the cgroup's limits

    @property
    def gpu_names(self) -> list[str]:
        """A name for each GPU."""
        return [gpu.name for gpu in self.gpus]

    @property
    def devices(self) -> int:
        """How many processes get a device of their own: a GPU or, without GPUs, a core."""
        return len(self.gpus) or self.cores

    @property
    def tf32(self) -> bool:
        """Whether torch computes convolutions in TF32: since Ampere, 8.0, by torch's default."""
        return self.tf32_allowed and bool(self.gpus) and self.gpus[0].capability >= (8, 0)

    def record(self) -> dict:
        """All that may explain a speed, as plain JSON values: the machine, and today's software."""
        commit, clean = checkout()
        found = {
            "cpu": self.cpu,
            "cores": self.cores,
            "memory_gib": self.memory_gib,
            "gpus": self.gpu_names,
            "system": self.system,
            "limits": self.limits,
            "versions": versions(),
            "git_commit": commit,
            "git_clean": clean,
            "variables": {k: os.environ[k] for k in RECORDED_VARIABLES if k in os.environ},
            "executable": "active Python" if ROOT not in Path(sys.executable).parents else ".venv",
        }
        if self.gpus:
            found |= {"driver": self.driver, "topology": self.topology}
        if self.nodes:
            found["nodes"] = len(self.nodes)
        return found


def look() -> Host:
    """This machine; two seconds, since torch is asked for the GPUs."""
    gpus, shown, more = torch_gpus(), (), {}
    if nvidia := nvml():
        if gpus:
            more["driver"] = nvidia.nvmlSystemGetDriverVersion()
        elif not hidden():
            handles = map(nvidia.nvmlDeviceGetHandleByIndex, range(nvidia.nvmlDeviceGetCount()))
            shown = tuple(map(nvidia.nvmlDeviceGetName, handles))
    if gpus:
        more["topology"] = output("nvidia-smi", "topo", "-m")
        more["slurm_gpus"] = "gpu" in output("sinfo", "-h", "-o", "%G")
    cpu = cpu_info()
    name = cpu.get("model name", platform.processor() or platform.machine())
    for word in ("(R)", "(TM)"):
        name = name.replace(word, "")
    return Host(
        cpu=name.split(" CPU")[0].split(" @")[0],
        cores=cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        cpu_flags=frozenset(cpu.get("flags", cpu.get("Features", "")).split()),
        gpus=gpus,
        unusable=shown,
        slurm_job="SLURM_JOB_ID" in os.environ,
        tf32_allowed=os.environ.get("NVIDIA_TF32_OVERRIDE") != "0",
        system=f"{platform.system()} {platform.release()}",
        limits=limits(),
        **more,
    )


def output(*command: str, limit: float = 20) -> str:
    """What a command prints, or "" where it is missing, fails, or takes too many seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def checkout() -> tuple[str, bool | None]:
    """The git commit of these files, and whether they are as it has them; "" and None where git
    cannot tell, as in a copy without .git.
    """
    # Results are no code: without them here, a run could not be resumed after the first of them.
    where = ("--", ".", ":!logs")
    status = ("git", "status", "--porcelain", "--branch", "--untracked-files=no", *where)
    lines = output(*status).splitlines()  # the first names the branch, so a failure has none
    commit = output("git", "rev-parse", "HEAD")
    return commit, len(lines) == 1 if commit and lines else None


def nvml():
    """NVIDIA's management library as a module, ready to be asked; None where nvidia-ml-py is not
    installed, or there is no driver.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def hidden() -> bool:
    """Whether the user keeps the GPUs out of this."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def torch_gpus() -> tuple[Gpu, ...]:
    """The GPUs that a child of this process may use, by asking one."""
    # From a disk that is far away, the first import of torch may take minutes.
    said = "" if hidden() else output(sys.executable, "-m", "bench.host", limit=600)
    try:
        found = json.loads(said.splitlines()[-1]) if said else []
    except ValueError:  # a library had the last word
        found = []
    return tuple(Gpu(**gpu | {"capability": tuple(gpu["capability"])}) for gpu in found)


def ask_torch() -> list[dict]:
    """In that child: the fields of each GPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    for number in range(count):
        seen = torch.cuda.get_device_properties(number)
        gpu = {"name": seen.name, "capability": [seen.major, seen.minor]}
        gpu["uuid"] = f"GPU-{seen.uuid}"
        with suppress(RuntimeError):  # another program has it, or nobody may
            gpu["free_mib"] = torch.cuda.mem_get_info(number)[0] / 2**20
        found.append(gpu)
    return found


def free_port() -> int:
    """A port of this machine on which no program listens now, another one in each call.

    The program that gets it listens only seconds later. Systems do not hand out ports of this range
    by themselves in the meantime, and another process of ours draws the same one once in 5,000.
    """
    for port in itertools.islice(PORTS, 5_000):
        with suppress(OSError):
            socket.create_server(("", port)).close()
            return port
    raise OSError("no port from 5000 to 9999 is free")


def free_mib(host: Host) -> float:
    """MiB that what we start may take: of the GPU with the least; else of memory, at this moment.

    Of a GPU as it was when the host was asked: before anything of ours ran.
    """
    if host.gpus:
        return min(gpu.free_mib for gpu in host.gpus)
    return min(psutil.virtual_memory().available, cgroup_free()) / 2**20


def cgroups(controller: str, root="/sys/fs/cgroup", groups="/proc/self/cgroup") -> list[tuple]:
    """The folders of this process's control group and of those above it, each with its version.

    A limit of any of them counts: a container, a pod and a job of Slurm each have groups of their
    own. Version 1 has a tree for each controller.
    """
    found = []
    with suppress(OSError):  # not Linux
        for line in Path(groups).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                version, top = 2, Path(root)
            elif controller in controllers.split(","):
                version, top = 1, Path(root, controller)
            else:
                continue
            group = Path(path.lstrip("/"))
            found += [(version, top / folder) for folder in (group, *group.parents)]
    return found


def cgroup_free(*where) -> float:
    """Bytes that the control groups leave to this process; infinite without a limit."""
    least = math.inf
    for version, folder in cgroups("memory", *where):
        new = version == 2
        names = (
            "memory.max memory.current" if new else "memory.limit_in_bytes memory.usage_in_bytes"
        )
        with suppress(OSError, ValueError):  # no such file; "max": no limit
            limit, used = (int((folder / name).read_text()) for name in names.split())
            words = (folder / "memory.stat").read_text().split()
            # The page cache gives way.
            cache = words[words.index("inactive_file" if new else "total_inactive_file") + 1]
            least = min(least, limit - used + int(cache))
    return least


def cgroup_cores(*where) -> float:
    """The cores of the control groups' quota; infinite without one."""
    least = math.inf
    for version, folder in cgroups("cpu", *where):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        with suppress(OSError, ValueError):  # no such file; "max": no limit
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if int(quota) > 0:  # version 1 writes -1 for no limit
                least = min(least, int(quota) / int(period))
    return least


def cores() -> int:
    """The CPU cores that this process may use: its affinity, and its cgroup's quota."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cgroup_cores())))


def cpu_info() -> dict[str, str]:
    """What Linux says of the first core: "model name", "flags" ("Features" on ARM) and more."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def limits(*where) -> dict:
    """What this process may use: its cores by number, and the limits of its control groups.

    Of each file the one nearest to the process, and of those one that sets a limit.
    """
    found = {"affinity": sorted(os.sched_getaffinity(0))}
    for name in ("cpu.max", "memory.max", "cpuset.cpus.effective"):
        texts = []
        for _, folder in cgroups(name.partition(".")[0], *where):
            with suppress(OSError):
                texts.append((folder / name).read_text().strip())
        if texts := [*filter(None, texts)]:
            found[name] = min(texts, key=lambda text: text.startswith("max"))  # the first of them
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


def machine(record: dict) -> str:
    """One line for captions, of a Host's record: "2 cores of AMD EPYC", "4 x Tesla V100"."""
    names = record["gpus"]
    one = f"{len(names)} x {names[0]}" if names else f"{record['cores']} cores of {record['cpu']}"
    return f"{record['nodes']} machines, each {one}" if record.get("nodes") else one


if __name__ == "__main__":
    print(json.dumps(ask_torch()))
