"""Training runs that stay started and compute in turn, a second or two each.

On a machine with other users wall time drifts by tens of percent within minutes, so two runs can
only be compared over the same seconds. A fresh start costs about 7 CPU-seconds a process, far more
than the slice to be timed. So every case is started once and stopped (SIGSTOP) but for its turns;
its loader's workers are stopped with it, and their queues stay as they were. The script needs no
change: the slice is made of whole windows of its own log, and the first record after each wake-up,
whose window holds the sleep, is not counted.

CPU seconds are those of all processes of the case, launcher apart, by the kernel's accounts (user
and system, 10 ms a process); they hardly depend on who else uses the machine.
"""

import json
import threading
import time
from pathlib import Path

import psutil

from bench.launch import Finished, environment, run

POLL = 0.005  # seconds between two looks at a log
START = 300.0  # seconds that a case may take to its first record, or to its next slice
LIMIT = 24 * 3600.0  # seconds for all the slices of a case


class CaseFailed(Exception):
    """A case ended, or got no slice done: the text is a line for the user."""


class Resident:
    """One case: started, stopped, and woken for its slices.

    As a context manager it leaves no process behind.
    """

    def __init__(self, name: str, command: list[str], folder: Path, threads: int):
        self.name, self.log = name, folder / f"{name.replace(' ', '-')}.jsonl"
        self.log.unlink(missing_ok=True)
        self.command = [*command, "--log-json", str(self.log)]
        self.launched = "torch.distributed.run" in command  # by an agent that computes nothing
        self.finished: Finished | None = None
        self.agent: psutil.Process | None = None
        self._offset = 0
        env = environment(threads)

        def work():
            self.finished = run(self.command, LIMIT, env)

        self.thread = threading.Thread(target=work, daemon=True)

    def __enter__(self) -> "Resident":
        """Starts the case, waits for its first window of steps, and stops it."""
        self.thread.start()
        try:
            self._find()
            records = self._records()
            self.start = next(records)
            next(record for record in records if record["event"] == "train")
            self._stop()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._find()
        for process in [self.agent, *self._members()] if self.agent else []:
            _tell(process, "kill")
        self.thread.join()

    def slice(self, windows: int) -> dict:
        """Wakes the case for that many windows of one epoch: steps, images and seconds.

        At an epoch's border it begins anew: what happens there (evaluation, new loader workers) is
        not in the slice, which favours the ancestors, whose workers start again in every epoch.
        """
        self._offset = self.log.stat().st_size  # what was logged just before the stop is not ours
        for process in self._members():
            _tell(process, "resume")
        count, epoch, starts = 0, None, 0
        for record in self._records():
            if record["event"] != "train":
                continue
            if record["epoch"] != epoch:
                epoch, count, starts = record["epoch"], 0, starts + 1
                if starts > 3:
                    raise CaseFailed(f"{self.name}: an epoch has no whole slice, lower --steps")
                cpu, step, images, seconds = self._cpu(), record["step"], 0, 0.0
                continue
            count += 1
            images += record["images"]
            seconds += record["seconds"]
            if count == windows:
                cpu = self._cpu() - cpu
                break
        self._stop()
        steps = record["step"] - step
        return {"steps": steps, "images": images, "seconds": seconds, "cpu_seconds": cpu}

    def _find(self) -> None:
        """Waits for the process that `run` starts in the thread, unless it has ended already."""
        while self.agent is None and self.thread.is_alive():
            children = psutil.Process().children()
            self.agent = next((p for p in children if str(self.log) in _cmdline(p)), None)
            time.sleep(POLL)

    def _records(self):
        """The records that the script adds to its log, as they come."""
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
            raise CaseFailed(f"{self.name}: {self.finished.last_line}")
        if time.monotonic() > until:
            raise CaseFailed(f"{self.name}: no step within {START:.0f} seconds")

    def _members(self) -> list[psutil.Process]:
        """The processes that compute: torchrun's agent only waits, and its leases must not end."""
        try:
            children = self.agent.children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return children if self.launched else [self.agent, *children]

    def _stop(self) -> None:
        """Stops every process, those included that are started meanwhile."""
        stopped = set()
        while new := set(self._members()) - stopped:
            for process in new:
                _tell(process, "suspend")
            stopped |= new

    def _cpu(self) -> float:
        """CPU seconds so far, those of ended children included."""
        total = 0.0
        for process in self._members():
            try:
                total += sum(process.cpu_times()[:4])
            except psutil.Error:
                pass
        return total


def _tell(process: psutil.Process, what: str) -> None:
    try:
        getattr(process, what)()
    except psutil.NoSuchProcess:
        pass


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
