"""What else the machine did while a case was measured; records.py drops rounds for it."""

import os
import resource
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from bench.host import Host, asking, output
from bench.process import GRACE, MARK, new_mark

TICKS = os.sysconf("SC_CLK_TCK")  # of /proc/stat, a second
# Of nvidia-smi's clocks_event_reasons.active: hardware slowdown, software and hardware thermal
# slowdown, power brake (NVML reference, nvmlClocksEventReasons). Power capping is no fault.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
QUERY = "clocks.sm,temperature.gpu,power.draw,clocks_event_reasons.active"
OLD_QUERY = QUERY.replace("event", "throttle")  # of drivers before 535


def _cpu() -> tuple[float, float]:
    """Seconds, summed over all cores: at work, and stolen by the hypervisor (man 5 proc)."""
    try:
        numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0, 0.0
    user, nice, system, _, _, irq, softirq, steal = (int(x) / TICKS for x in numbers)
    return user + nice + system + irq + softirq, steal


def _pressure() -> float:
    """Seconds in which some task waited for a core (pressure stall information)."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except (OSError, IndexError):
        return 0.0


class Monitor:
    """nvidia-smi, a line a second for as long as this is open; nothing where there is no GPU.

    One for a whole run: to start it takes longer than a short sample.
    """

    def __init__(self, host: Host):
        self.host = host

    def __enter__(self) -> "Monitor":
        self.process, self.file = None, tempfile.TemporaryFile()
        if self.host.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            visible = visible if output(*asking("name", visible)) else None
            known = (asking(query, visible) for query in (QUERY, OLD_QUERY))
            command = next((words for words in known if output(*words)), None)
            # Marked, so that what a killed harness leaves is swept with the rest.
            env = dict(os.environ, **{MARK: new_mark()})
            if command:
                self.process = subprocess.Popen([*command, "-l", "1"], stdout=self.file, env=env)
        return self

    def __exit__(self, *_) -> None:
        if self.process:
            self.process.kill()  # it has nothing to save
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        self.file.close()

    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self.file.fileno()).st_size

    def since(self, position: int) -> list[list[str]]:
        """The values of the lines that were written after a size."""
        text = os.pread(self.file.fileno(), 1 << 20, position).decode()
        return [line.split(", ") for line in text.splitlines() if line.count(", ") == 3]


class Watch:
    """Between two moments: `with Watch(monitor) as watch: ...`, then `watch.seen(cpu_seconds)`."""

    def __init__(self, monitor: Monitor):
        self.monitor = monitor

    def __enter__(self) -> "Watch":
        self.position = self.monitor.size()
        self.begin, self.cpu, self.pressure = time.monotonic(), _cpu(), _pressure()
        return self

    def __exit__(self, *_) -> None:
        self.wall = time.monotonic() - self.begin
        self.cpu = [after - before for after, before in zip(_cpu(), self.cpu, strict=True)]
        self.pressure = _pressure() - self.pressure
        self.rows = self.monitor.since(self.position)

    def seen(self, cpu_seconds: float | None) -> dict:
        """The conditions; cpu_seconds: what the case itself used, None where it is not known.

        steal and foreign (the work of others, kernel included) are shares of the time of all the
        machine's cores, pressure of the wall time. On a machine whose other cores belong
        to somebody else, foreign work cannot be told from theirs and is left out.
        """
        busy, stolen = self.cpu
        capacity = self.wall * (os.cpu_count() or 1)  # /proc/stat is of all of them
        found = {"wall": self.wall, "steal": stolen / capacity, "load": os.getloadavg()[0]}
        found |= {"pressure": self.pressure / self.wall, "cpu_seconds": cpu_seconds}
        if cpu_seconds is not None and self.monitor.host.cores == os.cpu_count():
            found["foreign"] = max(0.0, busy - cpu_seconds) / capacity
        for place, key in enumerate(("gpu_clock_mhz", "gpu_celsius", "gpu_watts")):
            if numbers := [x for row in self.rows if (x := _number(row[place])) is not None]:
                found[key] = max(numbers)  # of one at work
        if reasons := [row[3] for row in self.rows if row[3].startswith("0x")]:  # else "[N/A]"
            found["gpu_throttled"] = any(int(text, 16) & THROTTLED for text in reasons)
        return found


def _number(text: str) -> float | None:
    """What nvidia-smi says, or None: of a part by MIG it says "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return None


def children_seconds() -> float:
    """CPU seconds of all children so far that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
