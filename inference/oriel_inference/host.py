"""The processors and memory of the machine, read from the kernel as Triton reads them; unknown where there is no
/proc.
"""

import os
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path

MIN_WINDOW_S = 1.0
# Counts of clock ticks in a line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal.
TICKS, IDLE, IO_WAIT = 8, 3, 4


class HostLoad:
    """Utilisation and memory. Utilisation is that of the time since the last reading at least MIN_WINDOW_S ago; 0 at
    first.
    """

    def __init__(self, proc: Path = Path("/proc"), now: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._now = now
        self._read_s = now()
        self._ticks = self._read_ticks()
        self._utilization = 0.0

    def utilization(self) -> float | None:
        """Return the busy share of all processors, 0 to 1; None if unknown."""
        now = self._now()
        if now - self._read_s >= MIN_WINDOW_S:
            before, self._ticks, self._read_s = self._ticks, self._read_ticks(), now
            if before is not None and self._ticks is not None and (total := self._ticks[1] - before[1]) > 0:
                self._utilization = min(1.0, max(0.0, (self._ticks[0] - before[0]) / total))
        return None if self._ticks is None else self._utilization

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return (all memory of the machine, memory that is not available); None if unknown."""
        try:
            lines = (self._proc / "meminfo").read_text(encoding="ascii").splitlines()
            sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
            return sizes["MemTotal"], max(0, sizes["MemTotal"] - sizes["MemAvailable"])
        except (OSError, ValueError, KeyError, IndexError):
            return None

    def _read_ticks(self) -> tuple[int, int] | None:
        """Return (busy, all) clock ticks of all processors since the machine started."""
        try:
            with (self._proc / "stat").open(encoding="ascii") as file:
                name, *ticks = file.readline().split()
            counts = [int(each) for each in ticks[:TICKS]]
        except (OSError, ValueError):
            return None
        if name != "cpu" or len(counts) < TICKS:
            return None
        return sum(counts) - counts[IDLE] - counts[IO_WAIT], sum(counts)


def available_cores() -> int:
    """Return the cores that this process may use: its affinity and the quota of its control group, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no control group v2: only the affinity is known
    return max(1, cores)
