"""Runs one command as a process group of its own: with a time limit, and always cleaned up.

A launcher (torchrun, horovodrun, srun) starts processes in sessions of their own, which outlive it
when it is killed. So every process of a run carries the run's mark in its environment, and the
clean-up ends whatever carries it, in its group or not, child or orphan.
"""

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench import ROOT, errors, records
from bench.host import PORT, SHARED, free_port

GRACE = 5.0  # seconds between SIGTERM and SIGKILL
MARK = "LADDER_RUN"  # in the environment of every process of a run
# This machine since it was started. Slurm carries a mark to other nodes, where a harness's id means
# another process.
PLACE = socket.gethostname()
with suppress(OSError):  # not every container shows it
    PLACE += Path("/proc/sys/kernel/random/boot_id").read_text()
PLACE = hashlib.sha256(PLACE.encode()).hexdigest()[:12]
OWNER = f"{os.getpid()}-{int(psutil.Process().create_time())}-{PLACE}-"  # how our marks begin
# Of a mark of this machine: its harness's id and start.
SHAPE = re.compile(rf"(\d{{1,9}})-(\d{{1,12}})-{PLACE}-[0-9a-f]{{32}}")
CLOCK = 60  # seconds by which the system may move a start's time: it is counted from a clock's


@dataclass
class Finished:
    """What a command left: its exit code (-N: ended by signal N) and its output."""

    code: int
    out: str
    err: str
    timed_out: bool

    @property
    def last_line(self) -> str:
        """The line that says why it failed."""
        text = self.err if self.err.strip() else self.out
        return errors.reason(text)[:300] or "no output"


def environment(threads: int | None = None, **extra: str) -> dict[str, str]:
    """The environment of a child: threads per process, gloo on loopback, freed memory kept, and
    lines in one write: unbuffered, print() writes the line's end separately, and the lines of
    several processes run into each other.

    Without GLOO_SOCKET_IFNAME, gloo listens on the address of the host's name, which may be
    reachable from outside. glibc returns freed memory to the system by thresholds that it adapts.
    So one start of a program faults pages in again in every step, and the next does not. The
    highest thresholds that glibc would choose remove this difference.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | extra
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))  # bytes, on 64 bits its highest
    env.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**26))
    # Beside no run's own temporary folder, which goes with the run: to compile takes half a minute.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache" / "inductor"))
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

    mark: what its processes are known by, where the caller wants to find them (`marked`). PORT in
    the command or in env becomes a port that is free now: one chosen when the command was made may
    be another program's by the time that it starts.
    Raises FileNotFoundError where the program does not exist. On any exception, KeyboardInterrupt
    included, the command's processes are ended before it goes on.
    """
    mark = mark or new_mark()
    env = dict(env or environment(), **{MARK: mark})
    command, port = [str(part) for part in command], str(free_port())
    command = [port if part == PORT else part for part in command]
    env = {name: port if value == PORT else value for name, value in env.items()}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = None
        try:  # Popen, too: an interrupt within it leaves what it has started
            process = psutil.Popen(  # whose wait() sleeps; subprocess's looks 20 times a second
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,  # files, not pipes: a child that outlives its parent cannot block
                stderr=err,  # the reader
                env=env,
                cwd=cwd,
                start_new_session=True,
            )
            with suppress(psutil.TimeoutExpired):
                process.wait(limit)
            timed_out = process.returncode is None
        finally:
            end(mark)
            if process:
                with suppress(psutil.TimeoutExpired):  # in the kernel: a dead disk's, say
                    process.wait(GRACE)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    code = int(-signal.SIGKILL if process.returncode is None else process.returncode)
    return Finished(code, *texts, timed_out)


class Failed(Exception):
    """A launch that did not end well, and so measures nothing; the text is the reason."""


def with_startup(start: dict, begun: float) -> dict:
    """A script's start record with startup_seconds, from its launcher's start (a Unix time) on.

    Without its log's name, which says where on this machine the project lies.
    """
    kept = {name: value for name, value in start.items() if name != "log_json"}
    return kept | {"startup_seconds": start["time"] - begun}


def launch(command: list[str], env: dict, limit: float) -> list[dict]:
    """Runs a script's command with --log-json, and returns its records.

    Raises Failed with the exit code and the last error line, or the time limit.
    """
    elsewhere = command[0] == "srun" or "bench.nodes.spread" in command
    with scratch_folder() as folder, log_folder(elsewhere) as logs:
        log, begun = Path(logs) / "log.jsonl", time.time()
        done = run([*command, "--log-json", str(log)], limit, env | {"TMPDIR": folder})
        if done.timed_out:
            raise Failed(f"killed after {limit:.0f} s, its time limit")
        if done.code:
            cure = "; lower --batch-size" if "out of memory" in done.last_line else ""
            raise Failed(f"exit code {done.code}: {done.last_line}{cure}")
        lines, broken = records.lines(log)
    if broken or not lines:
        raise Failed("left no log that can be read")
    if [line["event"] for line in lines][-1:] != ["end"]:
        raise Failed("ended without a record of its end")
    if "time" in lines[0]:  # the oracle has none
        lines[0] = with_startup(lines[0], begun)
    return lines


def scratch_folder() -> tempfile.TemporaryDirectory:
    """A new folder for a command's TMPDIR: what a killed process leaves there goes with it.

    Never below the log folder: a loader's workers make sockets in TMPDIR, whose paths may have 107
    bytes, and beyond that their loader waits forever.
    """
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


def log_folder(slurm: bool) -> tempfile.TemporaryDirectory:
    """A new folder for scripts' logs; for those under srun beside the scripts, which all nodes see.

    /tmp is each node's own, and a job may run on another than the harness's.
    """
    if not slurm:
        return tempfile.TemporaryDirectory()
    SHARED.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=SHARED)


def heed_signals() -> None:
    """SIGTERM, and SIGHUP of a terminal that closes, end this process by its clean-up.

    One that is ignored stays so, as `nohup` has it; so is one that comes during the clean-up.
    """
    heeded = [signal.SIGTERM, signal.SIGHUP]
    heeded = [number for number in heeded if signal.getsignal(number) != signal.SIG_IGN]

    def leave(number, _):
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in heeded:
        signal.signal(number, leave)


def side_by_side(
    work: Callable, jobs: Iterable, most: int, ending: threading.Event | None = None
) -> list:
    """work(job) of each job, so many at a time, in threads.

    On an exception, Ctrl-C's included, `ending` is set, what is running is ended, and no further
    job begins.
    """
    with ThreadPoolExecutor(most) as pool:
        futures = [pool.submit(work, job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            if ending:
                ending.set()
            pool.shutdown(wait=False, cancel_futures=True)
            deadline = time.monotonic() + 4 * GRACE
            while time.monotonic() < deadline and not all(future.done() for future in futures):
                end(OWNER)  # again, for what was only being started
                time.sleep(0.05)
            raise


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


def sweep() -> int:
    """Ends what the runs of a harness left that was itself killed; how many processes it was.

    Only of harnesses on this machine: on another node and in a container, which have names of their
    own, the harness's id is not one of ours, and it may live and look dead. A mark that no harness
    made is nobody's.
    """
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    ended = []
    for process in marked(""):
        with suppress(psutil.Error):  # gone by now
            mark = SHAPE.fullmatch(process.environ()[MARK])
            if mark and process.pid not in ours and not lives(int(mark[1]), int(mark[2])):
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, timeout=GRACE)
    return len(ended)


def lives(number: int, begun: int) -> bool:
    """Whether a process with this id lives, and began at this Unix time."""
    try:
        return abs(psutil.Process(number).create_time() - begun) < CLOCK
    except psutil.Error:
        return psutil.pid_exists(number)  # not ours to ask: leave it alone
