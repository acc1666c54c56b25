"""Starts one torchrun on each of several machines, and ends all of them together.

python -m bench.nodes.spread --nodes hosta,hostb --per-node 4 --port 29500 -- SCRIPT [FLAGS]

For `bench run --nodes`. --remote says how a command starts on another machine: by default
`ssh -T {host}`. There, this module starts torchrun in this folder, with these variables, and ends
it as soon as its standard input ends: so nothing goes on when this program, or the connection, is
gone. If torchrun fails on one machine, it is ended on all.

The folder must have the same path on all machines. The first one is where rank 0 is. Their names
must mean IPv4 addresses: by these it finds the interface for Gloo.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from bench.host import REMOTE

SHELLS = {"ssh", "rsh"}  # give what follows the name to a shell, and so need it quoted
# Beginnings of the variables that go along; of the others, a machine has its own.
VARIABLES = ("CUBLAS_", "GLOO_", "LADDER_", "MALLOC_", "NCCL_", "OMP_", "TORCH", "PYTHON")
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
TICK = 0.5  # seconds from one look to the next


def remote_command(remote: str, host: str) -> list[str]:
    """The command that starts this module on another machine, to wait there for its job."""
    words = [word.replace("{host}", host) for word in shlex.split(remote)]
    module = shlex.join([sys.executable, "-m", "bench.nodes.spread", "--here"])
    inner = ["bash", "-c", f"cd {shlex.quote(os.getcwd())} && exec {module}"]
    shell = SHELLS & {Path(word).name for word in words}
    return [*words, shlex.join(inner)] if shell else [*words, *inner]


def interface_to(host: str) -> str | None:
    """The name of the interface by which packets to a machine leave; None for loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):
            probe.connect((host, 9))  # sends nothing
            own = probe.getsockname()[0]
            for name, addresses in psutil.net_if_addrs().items():
                if not own.startswith("127.") and any(a.address == own for a in addresses):
                    return name
    return None


def run_here() -> int:
    """One machine's part: torchrun as the first line of standard input says, until that ends."""
    job = json.loads(sys.stdin.readline())
    env = os.environ | job["variables"]
    if job["interface"] and env.get("GLOO_SOCKET_IFNAME", "lo") == "lo":
        if name := interface_to(job["interface"]):
            env["GLOO_SOCKET_IFNAME"] = name
    process = subprocess.Popen(job["command"], env=env, stdin=subprocess.DEVNULL)
    gone = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        gone.set()

    threading.Thread(target=watch, daemon=True).start()
    ranks: set[psutil.Process] = set()  # of torchrun's, which may be killed before them
    try:
        while process.poll() is None and not gone.wait(TICK):
            with suppress(psutil.NoSuchProcess):
                ranks.update(psutil.Process(process.pid).children(recursive=True))
    finally:
        process.terminate()  # torchrun then ends its processes
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        process.kill()
        for left in psutil.wait_procs(ranks, timeout=TICK)[1]:
            with suppress(psutil.NoSuchProcess):
                left.kill()
    return process.wait()


def start(args: argparse.Namespace, number: int) -> subprocess.Popen:
    """torchrun on one machine. Static rendezvous: c10d's compares clocks, and leaves late ones."""
    nodes = args.nodes.split(",")
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(nodes))]
    command += ["--node-rank", str(number), "--nproc-per-node", str(args.per_node)]
    command += ["--master-addr", nodes[0], "--master-port", str(args.port), *args.command]
    variables = {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)}
    job = {"command": command, "variables": variables, "interface": nodes[0 if number else 1]}
    process = subprocess.Popen(
        remote_command(args.remote, nodes[number]), stdin=subprocess.PIPE, text=True
    )
    with suppress(BrokenPipeError):  # the machine was not reached, as its exit code says
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    return process


def run_all(args: argparse.Namespace) -> int:
    """All machines; the exit code of the first that fails, once all have ended."""
    jobs: dict[str, subprocess.Popen | None] = dict.fromkeys(args.nodes.split(","))
    try:
        for number, host in enumerate(jobs):
            jobs[host] = start(args, number)
        while True:
            codes = {host: job.poll() for host, job in jobs.items()}
            if failed := next((host for host, code in codes.items() if code), None):
                print(f"spread: error: {failed}: exit code {codes[failed]}", file=sys.stderr)
                return codes[failed] if codes[failed] > 0 else 1
            if all(code == 0 for code in codes.values()):
                return 0
            time.sleep(0.2)
    finally:
        for job in filter(None, jobs.values()):
            with suppress(BrokenPipeError):
                job.stdin.close()  # torchrun there ends
        for job in filter(None, jobs.values()):
            try:
                job.wait(3 * GRACE)
            except subprocess.TimeoutExpired:
                job.kill()


def main(argv: list[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if argv == ["--here"]:
        return run_here()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--remote", default=REMOTE)
    parser.add_argument("--per-node", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("command", nargs="+")
    return run_all(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
