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
    best, kind = "", None
    path = os.path.realpath(path)
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                _, point, name, *_ = line.split()
                point = point.replace("\\040", " ")
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, name
    except OSError:
        return None
    return kind


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds since boot: ``busy`` of all processes, ``stolen`` by the host, and ``own``.

    ``own`` is this process and one other, the one measured. What ``busy`` has beyond it between
    two readings was used by somebody else.
    """

    busy_s: float
    stolen_s: float
    own_s: float

    @classmethod
    def read(cls, pid: int) -> CpuTimes | None:
        """The figures of this moment, or None where there is no /proc."""
        if sys.platform != "linux":
            return None
        tick = os.sysconf("SC_CLK_TCK")
        try:
            with open("/proc/stat") as file:
                user, nice, system, _, _, irq, softirq, steal = map(
                    int, file.readline().split()[1:9]
                )
            own = _ticks(pid) + _ticks(os.getpid())
        except (OSError, ValueError, IndexError):
            return None
        busy = user + nice + system + irq + softirq
        return cls(busy / tick, steal / tick, own / tick)


def _ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


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
        import resource

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
    try:
        with open("/proc/self/io") as file:
            for line in file:
                if line.startswith("read_bytes:"):
                    return int(line.split()[1])
    except OSError:
        pass  # no /proc, or a kernel that does not count
    return None
