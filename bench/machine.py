"""What the figures depend on: machine, versions, commit, and who else was computing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from streamload.cgroups import key_values
from streamload.memory import available_memory

__all__ = ["CpuTimes", "describe", "usable_cpus", "versions"]

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def usable_cpus() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe(path: str) -> dict[str, Any]:
    """Machine and commit, for the head of a file of results."""
    available = available_memory()
    return {
        "cpu": _cpu_model(),
        "cpus": usable_cpus(),
        "memory_bytes": key_values("/proc/meminfo").get("MemTotal:", 0) << 10 or None,
        "available_bytes": available.bytes,
        "available_limit": available.limit,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "filesystem": _filesystem(path),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "commit": _commit(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed version of each package that is installed."""
    found = {}
    for name in sorted(set(packages)):
        try:
            found[name] = metadata.version(name.replace("_", "-"))
        except metadata.PackageNotFoundError:
            continue
    return found


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


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _filesystem(path: str) -> str | None:
    best, kind = "", None
    path = os.path.realpath(path)
    try:
        with open("/proc/self/mounts") as file:
            for line in file:
                _, point, name = line.split()[:3]
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, name
    except OSError:
        return None
    return kind


def _commit() -> str | None:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
