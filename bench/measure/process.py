"""One command as a process group of its own: with a time limit, and always cleaned up.

A launcher (torchrun, horovodrun, srun) starts processes in sessions of their own, which outlive it
when it is killed. So every process of a run carries the run's mark in its environment, and the
clean-up ends whatever carries it, in its group or not, child or orphan.
"""

import json
import os
import select
import signal
import subprocess
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench import ROOT
from bench.cases import Case
from bench.host import Host
from bench.results.records import with_startup

GRACE = 5.0  # seconds between SIGTERM and SIGKILL
MARK = "LADDER_RUN"  # in the environment of every process of a run
OWNER = f"{os.getpid()}-{int(psutil.Process().create_time())}-"  # how the marks of ours begin


@dataclass
class Finished:
    """What a command left: its exit code (-N: ended by signal N), output, and wall seconds."""

    code: int
    out: str
    err: str
    seconds: float
    timed_out: bool

    @property
    def last_line(self) -> str:
        """The line that says why it failed: the last one on stderr that is not a traceback's."""
        lines = [line.strip() for line in (self.err or self.out).splitlines()]
        said = [line for line in lines if line and not set(line) <= set("=-~^_* ")]
        errors = [line for line in said if "error" in line.lower() and not line.startswith("W")]
        return (errors or said or ["no output"])[0 if errors else -1][:300]


def environment(threads: int | None = None, **extra: str) -> dict[str, str]:
    """The environment of a child: threads a process, gloo on loopback, freed memory kept.

    Without GLOO_SOCKET_IFNAME gloo listens on the address that the host name stands for, which
    may be reachable from outside. glibc gives freed memory back to the system by thresholds that
    it moves as the program goes, so that one start faults pages in anew in every step and the next
    does not; the highest ones that it would come to take that difference away.
    """
    env = dict(os.environ, PYTHONUNBUFFERED="1", **extra)
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))  # bytes, on 64 bits its highest
    env.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**26))
    # Beside no run's own temporary folder, which goes with the run: to compile takes half a minute.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache" / "inductor"))
    return env


def of_case(case: Case, host: Host) -> dict[str, str]:
    """The environment of a case: its threads, and of several GPUs only as many as it is to use."""
    env = environment(case.threads(host), **dict(case.variables))
    if host.gpus and case.launcher == "python":  # nn.DataParallel takes all that it sees
        every = env.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(case.world)))
        env["CUDA_VISIBLE_DEVICES"] = ",".join(every.split(",")[: case.world])
    if case.launcher == "srun" and "SLURM_JOB_ID" in env:  # steps of one job, at the same time
        port = 20_000 + (16 * os.getpid() + case.world) % 10_000
        env.setdefault("MASTER_PORT", str(port))
    return env


def new_mark() -> str:
    """A mark for one run, told from all others and from other harnesses'."""
    return OWNER + uuid.uuid4().hex


def run(
    command,
    limit: float,
    env: dict[str, str] | None = None,
    cwd: Path = ROOT,
    mark: str | None = None,
) -> Finished:
    """Runs a command to its end, or to its time limit in seconds, and leaves no process behind.

    mark: what its processes are known by, where the caller wants to find them (`marked`).
    Raises FileNotFoundError where the program does not exist. On any exception, KeyboardInterrupt
    included, the command's processes are ended before it goes on.
    """
    mark = mark or new_mark()
    env = dict(env or environment(), **{MARK: mark})
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Files, not pipes: a child that outlives its parent cannot block the reader.
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            timed_out = not ended(process, limit)
        finally:
            end(mark)
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Finished(process.returncode, *texts, time.monotonic() - begin, timed_out)


class Failed(Exception):
    """A launch that did not end well; the text is the row's reason."""


def launch(command: list[str], env: dict, limit: float) -> tuple[list[dict], Finished]:
    """Runs a script's command with --log-json, and returns its records.

    Raises Failed with the exit code and the last error line, or the time limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, begun = Path(folder) / "log.jsonl", time.time()
        done = run([*command, "--log-json", str(log)], limit, env | {"TMPDIR": folder})
        if done.timed_out:
            raise Failed(f"killed after {limit:.0f} s, its time limit")
        if done.code:
            cure = "; lower --batch-size" if "out of memory" in done.last_line else ""
            raise Failed(f"exit code {done.code}: {done.last_line}{cure}")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    if [line["event"] for line in lines][-1:] != ["end"]:
        raise Failed("ended without a record of its end")
    if "time" in lines[0]:  # the oracle has none
        lines[0] = with_startup(lines[0], begun)
    return lines, done


def ended(process: subprocess.Popen, limit: float) -> bool:
    """Waits for a process to end, so many seconds at most; whether it did.

    Popen.wait(limit) looks twenty times a second: with a dozen cases asleep, that is 1% of a core.
    """
    descriptor = os.pidfd_open(process.pid)
    try:
        return bool(select.select([descriptor], [], [], limit)[0])
    finally:
        os.close(descriptor)


def marked(prefix: str) -> list[psutil.Process]:
    """The live processes whose environment has a MARK that begins so."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK)
            if mark is not None and mark.startswith(prefix) and process.status() != "zombie":
                found.append(process)
        except psutil.Error:  # gone by now, or another user's
            pass
    return found


def end(prefix: str) -> None:
    """Ends every process with such a mark: SIGTERM, GRACE seconds, then SIGKILL until none is left.

    end(OWNER) ends all that this process has started.
    """
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        members = marked(prefix)
        for member in members:
            try:
                member.send_signal(number)  # psutil checks that the id was not reused
            except psutil.NoSuchProcess:
                pass
        deadline = time.monotonic() + GRACE
        while marked(prefix):  # not psutil's wait: it would take the exit code away from Popen
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            return


def owned() -> list[tuple[psutil.Process, int, bool]]:
    """The live processes of any harness's runs: each with the harness's id and if it lives."""
    found = []
    for process in marked(""):
        try:
            owner, created = process.environ()[MARK].split("-")[:2]
        except psutil.Error:  # gone by now
            continue
        try:
            alive = str(int(psutil.Process(int(owner)).create_time())) == created
        except psutil.NoSuchProcess:
            alive = False
        found.append((process, int(owner), alive))
    return found


def sweep() -> int:
    """Ends what the runs of a harness left that was itself killed; how many processes it was."""
    orphans = [process for process, _, alive in owned() if not alive]
    for process in orphans:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(orphans, timeout=GRACE)
    return len(orphans)


def others() -> set[int]:
    """The ids of other harnesses that have something running, those that started this one apart."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return {owner for _, owner, alive in owned() if alive} - mine
