"""What a node knows of itself."""

import fcntl
import hashlib
import os
import platform
import re
import resource
import shlex
import socket
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import torch

from .meeting import own

SUFFIXES = {".py", ".sh", ".toml", ".yaml", ".yml"}  # of files that decide what is trained
FILES = 5000  # that are read at most
# Variables that change how ranks compute or talk. Those that name an interface differ by right.
VARIABLES = re.compile(r"(NCCL|GLOO|TORCH|PYTORCH|CUBLAS|CUDNN)_|(OMP|MKL)_NUM_THREADS$")
BY_NODE = re.compile(
    r"_IFNAME$|_LOG_LEVEL$|_DEBUG|_DIR$|_FILE$|_HOME$|_HCA$|_PATH$|_INDUCTOR_CACHE"
)


def gather(files: dict[str, str], command: list[str]) -> dict:
    """All of it, in JSON's types. files: digests() of the code."""
    variables = {
        key: value
        for key, value in sorted(os.environ.items())
        if VARIABLES.match(key) and not BY_NODE.search(key)
    }
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "name": socket.gethostname(),
        "started": time.strftime("%X"),
        "interfaces": interfaces(),
        "own_name": own_name(),
        "gloo": gloo_address(),
        "gloo_ifname": os.environ.get("GLOO_SOCKET_IFNAME"),
        "nccl": nccl_interface(),
        "torch": torch.__version__,
        "nccl_version": ".".join(map(str, nccl)),
        "python": platform.python_version(),
        "gpus": gpus(),
        "cores": cores(),
        "all_cores": os.cpu_count(),
        "shm_free": shm and shm.f_bavail * shm.f_frsize,
        "open_files": soft,
        "infiniband": os.path.isdir("/sys/class/infiniband"),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "variables": variables,
        "code": code_hash(files),
        "command": shlex.join(command),
        "slurm": "SLURM_JOB_ID" in os.environ,
    }


def read(path: str) -> str:
    """A small file of the system; empty where it can't be read."""
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def interfaces() -> list[dict]:
    """The interfaces that are up, in the system's order: name, addresses (IPv4 first), MTU."""
    found = []
    lines = [line.split() for line in read("/proc/net/if_inet6").splitlines()]
    ipv6 = [(line[-1], line[0]) for line in lines if line[3] != "20"]  # but no link-local ones
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request, addresses = struct.pack("256s", name.encode()), []
            flags = fcntl.ioctl(any_socket, 0x8913, request)  # SIOCGIFFLAGS
            with suppress(OSError):  # one without an IPv4 address
                address = fcntl.ioctl(any_socket, 0x8915, request)[20:24]  # SIOCGIFADDR
                addresses.append(socket.inet_ntoa(address))
            numbers = [bytes.fromhex(number) for where, number in ipv6 if where == name]
            addresses += [socket.inet_ntop(socket.AF_INET6, number) for number in numbers]
            if addresses and struct.unpack_from("H", flags, 16)[0] & 1:  # IFF_UP
                mtu = int(read(f"/sys/class/net/{name}/mtu") or 0)
                found.append({"name": name, "addresses": addresses, "mtu": mtu})
    return found


def own_name() -> list[str]:
    """The addresses that this machine's own name means, in the order in which Gloo tries them."""
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return [*dict.fromkeys(address[0] for *_, address in found)]
    return []


def gloo_address() -> str | None:
    """The address that Gloo tells the other ranks: the first of the own name's that is really here,
    unless GLOO_SOCKET_IFNAME names an interface. None if there is no such interface.
    """
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return next((each["addresses"][0] for each in interfaces() if each["name"] == name), None)
    return next(filter(own, own_name()), "127.0.0.1")


def nccl_interface() -> str | None:
    """The interface by which NCCL begins: an InfiniBand one, else the first but docker's and lo."""
    names = [each["name"] for each in interfaces()]
    if wanted := os.environ.get("NCCL_SOCKET_IFNAME", ""):
        sign, exact = wanted[0], wanted.lstrip("^").startswith("=")
        starts = wanted.lstrip("^=").split(",")

        def chosen(name):
            return name in starts if exact else name.startswith(tuple(starts))

        return next((name for name in names if chosen(name) != (sign == "^")), None)
    usual = [name for name in names if not name.startswith(("docker", "lo"))]
    return next((n for n in names if n.startswith("ib")), (usual or names or [None])[0])


def gpus() -> list[str]:
    """Name and driver of each GPU that torch may use. It asks nvidia-smi, so CUDA is not begun."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
        return done.stdout.splitlines()[: torch.cuda.device_count()]
    return ["GPU"] * torch.cuda.device_count()


def cores() -> float:
    """The cores that this process may use: its affinity, or its control group's share."""
    here = len(os.sched_getaffinity(0))
    share = read("/sys/fs/cgroup/cpu.max").split()  # microseconds of time, of each period
    return min(here, int(share[0]) / int(share[1])) if share and share[0].isdigit() else here


def digests(folder: Path) -> dict[str, str]:
    """A hash of each file of code below a folder. Not of what is hidden or installed there."""
    found, large = {}, 2**20
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = sorted(
            each
            for each in folders
            if each[0] != "." and each not in {"__pycache__", "node_modules", "site-packages"}
            if not (here / each / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            path = here / name
            if path.suffix in SUFFIXES and len(found) < FILES:
                with suppress(OSError):
                    if path.stat().st_size <= large:
                        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
                        found[str(path.relative_to(folder))] = digest
    return found


def code_hash(files: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]


def interface_of(facts: dict, address: str) -> dict | None:
    """A node's interface that has an address."""
    return next((each for each in facts["interfaces"] if address in each["addresses"]), None)


def slurms_choice() -> tuple[str, int]:
    """Where the tasks of a Slurm step meet: on its first node, at a port of the job's own."""
    port = 20000 + int(os.environ.get("SLURM_JOB_ID", 0)) % 10000
    return first_node(os.environ["SLURM_STEP_NODELIST"]), port


def first_node(nodes: str) -> str:
    """The first name of Slurm's list, such as node[07-09,12]."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "hostnames", nodes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.split()[0]
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])
