"""Whose CPU time it was: the measured process's, somebody else's, or the host's."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass

__all__ = ["BUSY_CPUS", "CpuTimes", "Usage", "cpu_model", "filesystem_of", "usable_cpus"]

BUSY_CPUS = 0.25
"""Other processes' CPUs, on average over a measurement, from which on it is called disturbed."""


def usable_cpus() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def filesystem_of(path: str) -> str | None:
    """The kind of file system that holds ``path`` (``ext4``, ``nfs4``), or None if not told."""
    import psutil

    path = os.path.realpath(path)
    best, kind = "", None
    for partition in psutil.disk_partitions(all=True):
        point = partition.mountpoint
        inside = path == point or path.startswith(point.rstrip(os.sep) + os.sep)
        if inside and len(point) >= len(best):  # of two at one point the later one shows
            best, kind = point, partition.fstype
    return kind


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds since boot that other processes used, and that the host took away.

    Other processes are all but this one and one more, the one measured.
    """

    others_s: float
    stolen_s: float

    @classmethod
    def read(cls, pid: int) -> CpuTimes | None:
        """The figures of this moment, or None where the system does not tell."""
        import psutil

        try:
            machine = psutil.cpu_times()
            own = [psutil.Process(number).cpu_times() for number in (pid, os.getpid())]
        except (OSError, psutil.Error):
            return None
        busy = ("user", "nice", "system", "irq", "softirq")
        busy_s = sum(getattr(machine, kind, 0.0) for kind in busy)
        own_s = sum(times.user + times.system for times in own)
        return cls(busy_s - own_s, getattr(machine, "steal", 0.0))


@dataclass(frozen=True)
class Usage:
    """What this process has used since its start.

    Attributes:
        user_s, system_s: CPU seconds of all threads, in its own code and in the kernel.
        storage_bytes: fetched from disks for it, readahead included; None where not told.
    """

    user_s: float
    system_s: float
    storage_bytes: int | None

    @classmethod
    def read(cls) -> Usage:
        """The figures of this moment."""
        if sys.platform == "win32":
            times = os.times()
            return cls(times.user, times.system, None)
        import resource  # finer than psutil, which counts in the kernel's ticks

        spent = resource.getrusage(resource.RUSAGE_SELF)
        return cls(spent.ru_utime, spent.ru_stime, _storage_bytes())

    def since(self, before: Usage) -> dict[str, float | int | None]:
        """The differences, as JSON has them."""
        read = None
        if self.storage_bytes is not None and before.storage_bytes is not None:
            read = self.storage_bytes - before.storage_bytes
        return {
            "user_s": self.user_s - before.user_s,
            "system_s": self.system_s - before.system_s,
            "storage_bytes": read,
        }


def _storage_bytes() -> int | None:
    import psutil

    try:
        # Elsewhere it counts what came from caches, too.
        linux = sys.platform == "linux"
        return psutil.Process().io_counters().read_bytes if linux else None
    except (OSError, RuntimeError, ValueError, psutil.Error):  # a kernel that does not count
        return None
