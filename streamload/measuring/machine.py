"""The machine, and whose CPU time it was: the measured process's, somebody else's, the host's."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any, NamedTuple

from streamload.core.options import usable_cpus
from streamload.system.filesystems import filesystem_of
from streamload.system.memory import available_memory

BUSY_CPUS = 0.25
"""Other processes' CPUs, on average over a measurement, from which on it is called disturbed."""


def describe(path: str | None) -> dict[str, Any]:
    """What figures depend on, for their head; ``path`` is what is loaded, if it is known."""
    import psutil

    available = available_memory()
    return {
        "cpu": _cpu_model(),
        "cpus": usable_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
        "available_bytes": available.bytes,
        "available_limit": available.limit,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "filesystem": None if path is None else filesystem_of(path),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def _cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


class CpuTimes(NamedTuple):
    """CPU seconds since boot that other processes used, and that the host took away.

    Other processes are all but this one and one more, the one measured.
    """

    others_s: float
    stolen_s: float


def cpu_times(pid: int) -> CpuTimes | None:
    """The figures of this moment beside process ``pid``, or None where they are not told."""
    import psutil

    try:
        machine = psutil.cpu_times()
        own = [psutil.Process(number).cpu_times() for number in (pid, os.getpid())]
    except (OSError, psutil.Error):
        return None
    busy = ("user", "nice", "system", "irq", "softirq")
    busy_s = sum(getattr(machine, kind, 0.0) for kind in busy)
    own_s = sum(times.user + times.system for times in own)
    return CpuTimes(busy_s - own_s, getattr(machine, "steal", 0.0))


def usage() -> dict[str, float | None]:
    """What this process has used since its start.

    ``user_s`` and ``system_s`` are CPU seconds of all threads, in its own code and in the kernel;
    ``storage_bytes`` were fetched from disks for it, readahead included (None where not told).
    """
    if sys.platform == "win32":
        times = os.times()
        return {"user_s": times.user, "system_s": times.system, "storage_bytes": None}
    import resource  # finer than psutil, which counts in the kernel's ticks

    spent = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "user_s": spent.ru_utime, "system_s": spent.ru_stime, "storage_bytes": storage_bytes()
    }  # fmt: skip


def usage_since(before: dict[str, float | None]) -> dict[str, float | None]:
    """What has been used since ``usage`` told ``before``."""
    used: dict[str, float | None] = {}
    for key, now in usage().items():
        then = before[key]
        used[key] = None if now is None or then is None else now - then
    return used


def storage_bytes(pid: int | None = None) -> int | None:
    """What was fetched from disks for a process (None: this one), where the system tells."""
    if sys.platform != "linux":  # elsewhere what came from caches is counted, too
        return None
    import psutil

    try:
        return psutil.Process(pid).io_counters().read_bytes
    except (OSError, RuntimeError, ValueError, psutil.Error):  # a kernel that does not count
        return None
