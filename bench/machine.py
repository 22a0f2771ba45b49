"""What the figures depend on: machine, versions, commit, and who else was computing."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from streamload.measuring.machine import cpu_model, filesystem_of, usable_cpus
from streamload.system.cgroups import key_values
from streamload.system.memory import available_memory

__all__ = ["describe", "usable_cpus", "versions"]

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def describe(path: str) -> dict[str, Any]:
    """Machine and commit, for the head of a file of results."""
    available = available_memory()
    return {
        "cpu": cpu_model(),
        "cpus": usable_cpus(),
        "memory_bytes": key_values("/proc/meminfo").get("MemTotal:", 0) << 10 or None,
        "available_bytes": available.bytes,
        "available_limit": available.limit,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "filesystem": filesystem_of(path),
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
