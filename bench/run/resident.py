"""Keeps training runs started, and lets them compute in turn, a second or two each.

On a machine with other users wall time drifts by tens of percent within minutes, so two runs can
only be compared over the same seconds. A fresh start costs about 7 CPU-seconds a process, far more
than the slice to be timed. So every case is started once and stopped (SIGSTOP) except for its
turns; its loader's workers are stopped with it, and their queues stay as they were. The script
needs no change: the slice is made of whole records of the probe's log. The first record after each
wake-up is not counted, because its seconds include the sleep.

CPU seconds are those of all processes of the case without the launcher, by the kernel's accounts
(user and system, 10 ms per process); they hardly depend on who else uses the machine. Memory is the
sum over all its processes, launcher included, by the kernel's accounts, too.
"""

import json
import threading
import time
from pathlib import Path

import psutil

from bench.process import (
    GRACE,
    Failed,
    Finished,
    end,
    marked,
    new_mark,
    run,
    scratch_folder,
    with_startup,
)

POLL = 0.02  # seconds between two looks at a log
START = 300.0  # seconds that a case may take to its first record, or to its next one
LIMIT = 24 * 3600.0  # seconds for all the slices of a case
LAUNCHERS = ("torch.distributed.run", "srun", "horovodrun")  # how a word of theirs ends


class Resident:
    """One case: started, stopped, and woken for its slices.

    As a context manager it leaves no process behind.
    """

    def __init__(self, name: str, command: list[str], folder: Path, env: dict[str, str]):
        self.name, self.log = name, folder / f"{name.replace(' ', '-')}.jsonl"
        self.log.unlink(missing_ok=True)
        self.command = [*command, "--log-json", str(self.log), "--patient"]
        self.mark = new_mark()
        self.window = 1  # steps between two records, for who asks for slices
        self.finished: Finished | None = None
        self._offset = 0
        # Asleep for minutes, a process must not take its peers' silence for their death. --patient
        # says the same to torch's process groups.
        env = env | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "86400"}

        def work():
            with scratch_folder() as scratch:
                self.finished = run(self.command, LIMIT, env | {"TMPDIR": scratch}, mark=self.mark)

        self.thread = threading.Thread(target=work, daemon=True)

    def __enter__(self) -> "Resident":
        self.begin().ready()
        return self

    def begin(self) -> "Resident":
        """Starts the case, and does not wait for it."""
        self.begun = time.time()
        self.thread.start()
        return self

    def ready(self, steps: int = 0) -> None:
        """Waits for the case's first line of training, and that of so many steps, and stops it;
        ends it where there is none. Raises Failed.
        """
        try:
            records = self._records()
            self.start = with_startup(next(records), self.begun)
            trains = (record for record in records if record["event"] == "train")
            self.first = record = next(trains)
            while record["step"] < steps:
                record = next(trains)
            if not self._members():
                cure = "start this on that machine, within a job"
                raise Failed(f"{self.name}: its processes are on another machine: {cure}")
            self._stop()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_) -> None:
        # First what computes, which asleep heeds nothing else; its launcher then ends by itself. A
        # killed srun would leave its job to Slurm, with the cores that it has.
        deadline = time.monotonic() + GRACE
        while self.thread.is_alive() and time.monotonic() < deadline:
            self.kill()
            self.thread.join(POLL)
        deadline += 4 * GRACE
        while self.thread.is_alive() and time.monotonic() < deadline:
            end(self.mark)  # again, for a process that was only being started
            self.thread.join(POLL)

    def kill(self) -> None:
        """Ends what computes, and does not wait for it."""
        for process in self._members():
            _tell(process, "kill")

    def slice(self, steps: int, settle: int = 0) -> dict:
        """Wakes the case for that many steps at least, and returns their records.

        Steps are counted, not records: one at an epoch's end has fewer of them. settle: steps that
        do not count either, after the first record, whose time holds the sleep; in them caches are
        still cold. cpu_seconds are of the whole slice; memory_mib is the sum of the processes'
        peaks so far, launcher included, and largest_mib the highest of them.
        """
        self._offset = self.log.stat().st_size  # what was logged just before the stop is not ours
        members = self._members()
        before = _cpu(members)
        for process in members:
            _tell(process, "resume")
        windows, after, woken = [], None, None
        for record in self._records():
            if record["event"] != "train":
                continue
            woken = record["step"] if woken is None else woken
            if record["step"] < woken + settle:
                continue
            if after is None:
                after = record["step"]
                continue
            windows.append(record)
            if record["step"] >= after + steps:
                break
        self._stop()
        peaks = [*map(_peak_mib, marked(self.mark))]
        return {
            "after": after,
            "windows": windows,
            "cpu_seconds": _cpu(members) - before,
            "memory_mib": sum(peaks),
            "largest_mib": max(peaks, default=0.0),
        }

    def _records(self):
        """The records that are added to the log, as they come."""
        until = time.monotonic() + START
        while True:
            try:
                with open(self.log, "rb") as file:
                    file.seek(self._offset)
                    line = file.readline()
            except FileNotFoundError:
                line = b""
            if line.endswith(b"\n"):
                self._offset += len(line)
                until = time.monotonic() + START
                yield json.loads(line)
            else:
                self._check(until)
                time.sleep(POLL)

    def _check(self, until: float) -> None:
        if self.finished is not None:
            raise Failed(f"{self.name}: {self.finished.last_line}")
        if time.monotonic() > until:
            raise Failed(f"{self.name}: no step within {START:.0f} seconds")

    def _members(self) -> list[psutil.Process]:
        """The processes that compute, under any launcher.

        A launcher only waits, and is left awake: it has leases that must not end.
        """
        return [p for p in marked(self.mark) if not _is_launcher(p)]

    def _stop(self) -> None:
        """Stops every process, those included that are started meanwhile."""
        stopped = set()
        while new := set(self._members()) - stopped:
            for process in new:
                _tell(process, "suspend")
            stopped |= new


def _cpu(members: list[psutil.Process]) -> float:
    """CPU seconds of these processes so far, those of their ended children included."""
    total = 0.0
    for process in members:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:
            pass
    return total


def _peak_mib(process: psutil.Process) -> float:
    """The most memory that a process had at any time: its resident set (VmHWM, man 5 proc)."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):  # gone by now, or another system
        return 0.0


def _tell(process: psutil.Process, what: str) -> None:
    try:
        getattr(process, what)()
    except psutil.NoSuchProcess:
        pass


def _is_launcher(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()[:4]
    except psutil.Error:
        return True  # gone by now
    return any(word.endswith(LAUNCHERS) for word in words)
