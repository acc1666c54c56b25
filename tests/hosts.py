"""Two hosts made of network namespaces (bench/nodes/hosts.sh), and doctor on all of them."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "bench/nodes/hosts.sh"
LETTERS = "abcdefgh"


@dataclass
class Start:
    """How a host starts doctor. shell: what it does before; env: what it sets."""

    flags: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)
    shell: str = "true"
    prefix: str = ""
    command: str = "train.py --lr 0.1"
    starts: bool = True


@dataclass
class Report:
    """What a host's doctor said."""

    code: int
    out: str
    data: dict

    @property
    def findings(self) -> list[dict]:
        return self.data.get("findings", [])


class Lab:
    """The hosts, and a folder with the code that each of them has."""

    def __init__(self, folder: Path, name: str, count: int = 2):
        self.folder, self.name, self.count = folder, name, count
        for host in self.hosts():
            (folder / host).mkdir()
            (folder / host / "train.py").write_text("print('training')\n")
        (folder / "shared").mkdir()

    def hosts(self) -> list[str]:
        return [f"host{letter}" for letter in LETTERS[: self.count]]

    def script(self, *words) -> subprocess.CompletedProcess:
        command = ["bash", SCRIPT, *words]
        env = os.environ | {"HOSTS": self.name}
        done = subprocess.run(
            [str(w) for w in command], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done

    def ip(self, host: str, words: str) -> None:
        self.script("ip", host, *words.split())

    def sh(self, host: str, text: str) -> None:
        self.script("run", host, "sh", "-ec", text)

    def names(self, host: str, text: str) -> None:
        """What that host's /etc/hosts says, beside localhost."""
        Path(f"/etc/netns/{self.name}-{host}/hosts").write_text(f"127.0.0.1 localhost\n{text}")

    def start(self, host: str, command: str, env: dict) -> subprocess.Popen:
        """A shell's command on a host, from the project's folder."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("GLOO_", "NCCL_"))}
        env = clean | {"HOSTS": self.name, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | env
        words = ["bash", str(SCRIPT), "run", host, "bash", "-ec", command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(words, env=env, cwd=ROOT, start_new_session=True, **pipes)

    def remote(self) -> str:
        """How `bench run --remote` starts a command on a host: by ssh to a real sshd there, where
        this machine has one. It has keys and settings of its own, which no other host sees.
        """
        inside = f"env HOSTS={self.name} bash {SCRIPT} run"
        if not (sshd := shutil.which("sshd", path="/usr/sbin:/usr/bin")):
            return f"{inside} {{host}}"
        for key in ("user", "server"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key]
            subprocess.run(words, check=True, timeout=20)
        Path("/run/sshd").mkdir(exist_ok=True)  # it insists
        settings = "PermitRootLogin yes\nStrictModes no\nUsePAM yes\nPidFile none\n"
        settings += f"HostKey {self.folder}/server\nAuthorizedKeysFile {self.folder}/user.pub\n"
        (self.folder / "sshd_config").write_text(settings)
        for host in self.hosts():
            self.script("run", host, sshd, "-f", self.folder / "sshd_config")
        options = (
            f"-i {self.folder}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        )
        return f"{inside} hosta ssh -F none -o LogLevel=ERROR {options} -T {{host}}"

    def doctor(self, *starts: Start, limit: float = 100) -> list[Report]:
        """Runs it on all hosts at once. Raises TimeoutExpired if it does not end."""
        jobs = {}
        for k, (host, start) in enumerate(zip(self.hosts(), starts, strict=True)):
            file = self.folder / f"{host}.json"
            file.unlink(missing_ok=True)
            flags = {"host": "10.77.0.1", "nnodes": self.count, "node": k, "port": 29500}
            flags |= {"code": self.folder / host, "shared": self.folder / "shared", "json": file}
            flags |= start.flags
            words = [w for name, value in flags.items() for w in (f"--{name}", str(value))]
            python = [sys.executable, "-m", "bench", "doctor", *words, "--"]
            line = f"{start.shell}\nexec {start.prefix} {shlex.join(python)} {start.command}"
            if start.starts:
                jobs[host] = self.start(host, line, start.env)
        return [self.finish(host, jobs.get(host), limit) for host in self.hosts()]

    def finish(self, host: str, job: subprocess.Popen | None, limit: float) -> Report:
        if job is None:
            return Report(0, "", {})
        try:
            out, _ = job.communicate(timeout=limit)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
        file = self.folder / f"{host}.json"
        return Report(job.returncode, out, json.loads(file.read_text()) if file.exists() else {})


def lacking() -> str | None:
    """Why there can be no such hosts here."""
    if os.geteuid():
        return "hosts of one's own need root"
    for tool in ("ip", "tc", "unshare"):
        if not shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin"):
            return f"hosts of one's own need {tool}"
    done = subprocess.run(["ip", "netns", "add", "hosts-try"], capture_output=True, text=True)
    if done.returncode:
        return f"no network namespaces here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", "hosts-try"], capture_output=True)
    return None


@contextmanager
def lab(*flags, count: int = 2):
    """The hosts; at the end nothing of them is left."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        found = Lab(Path(folder), f"t{os.getpid()}", count)
        try:
            found.script("up", count, *flags)
            yield found
        finally:
            found.script("down")
            left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
            assert found.name not in left and not [*Path("/etc").glob(f"netns/{found.name}-*")]


def build_shim(folder: Path) -> Path:
    """tests/shim.c as a library for LD_PRELOAD."""
    made = folder / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", made, ROOT / "tests/shim.c", "-ldl"]
    subprocess.run([str(w) for w in command], check=True, timeout=60)
    return made
