"""Watches what else the machine does while a case is measured; records.py drops rounds for it."""

import os
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from bench.host import Host, nvml

PERIOD = 0.3  # seconds between two looks at the GPUs
# Of NVML's reasons for a clock below the highest (nvmlClocksEventReasons): hardware slowdown,
# software and hardware thermal slowdown, power brake. Power capping is no fault.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
# What NVML is asked of a GPU, and how. The last function has the name that all drivers know.
QUESTIONS = {
    "gpu_clock_mhz": lambda nvidia, gpu: nvidia.nvmlDeviceGetClockInfo(gpu, nvidia.NVML_CLOCK_SM),
    "gpu_celsius": lambda nvidia, gpu: nvidia.nvmlDeviceGetTemperature(
        gpu, nvidia.NVML_TEMPERATURE_GPU
    ),
    "gpu_watts": lambda nvidia, gpu: nvidia.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "gpu_throttled": lambda nvidia, gpu: bool(
        nvidia.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & THROTTLED
    ),
}


def _cpu() -> tuple[float, float]:
    """Seconds, summed over all cores: at work, and stolen by the hypervisor."""
    seen = psutil.cpu_times()
    return seen.user + seen.nice + seen.system + seen.irq + seen.softirq, seen.steal


def _pressure() -> float:
    """Seconds in which some task waited for a core (pressure stall information)."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except (OSError, IndexError):
        return 0.0


class Watch:
    """Between two moments: `with Watch(host) as watch: ...`, then `watch.seen(cpu_seconds)`."""

    def __init__(self, host: Host):
        self.host, self.gpus = host, {}
        self.nvidia = nvml() if host.gpus else None
        self.handles, self.left = [], threading.Event()
        for gpu in host.gpus if self.nvidia else ():
            with suppress(self.nvidia.NVMLError):
                self.handles.append(self.nvidia.nvmlDeviceGetHandleByUUID(gpu.uuid))
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self.begin, self.cpu, self.pressure = time.monotonic(), _cpu(), _pressure()
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.left.set()
        self.thread.join()
        self.wall = time.monotonic() - self.begin
        self.cpu = [after - before for after, before in zip(_cpu(), self.cpu, strict=True)]
        self.pressure = _pressure() - self.pressure

    def _look(self) -> None:
        """Keeps the highest of what each GPU says, until the watch ends: of one at work."""
        while self.handles and not self.left.wait(PERIOD):
            for handle in self.handles:
                for key, ask in QUESTIONS.items():
                    with suppress(self.nvidia.NVMLError):  # not every GPU knows all
                        found = ask(self.nvidia, handle)
                        self.gpus[key] = max(self.gpus.get(key, found), found)

    def seen(self, cpu_seconds: float | None) -> dict:
        """The conditions; cpu_seconds: what the case itself used, None where it is not known.

        steal and foreign (the work of others, kernel included) are shares of the time of all the
        machine's cores, pressure of the wall time. On a machine whose other cores belong
        to somebody else, foreign work cannot be told from theirs and is left out.
        """
        busy, stolen = self.cpu
        capacity = self.wall * (os.cpu_count() or 1)  # psutil's seconds are of all of them
        found = {"wall": self.wall, "steal": stolen / capacity, "load": os.getloadavg()[0]}
        found |= {"pressure": self.pressure / self.wall, "cpu_seconds": cpu_seconds}
        if cpu_seconds is not None and self.host.cores == os.cpu_count():
            found["foreign"] = max(0.0, busy - cpu_seconds) / capacity
        return found | self.gpus


def children_seconds() -> float:
    """CPU seconds of all children so far that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
