"""What the figures depend on: machine, versions, commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import psutil

from streamload.measuring.machine import cpu_model, filesystem_of, usable_cpus
from streamload.measuring.peers import Peer
from streamload.system.memory import available_memory

__all__ = ["head_line"]

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def head_line(
    command: str, path: str, peers: Iterable[Peer], *, name: str | None = None, **asked: Any
) -> dict[str, Any]:
    """The first line of a file of results: what is asked for, machine, versions and commit."""
    packages = {name.split(".")[0] for peer in peers for name in peer.imported}
    return {
        "kind": "run",
        "command": command,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "path": name or os.path.basename(os.path.abspath(path)),
        **asked,
        "machine": _describe(path),
        "versions": _versions(packages | {"torch", "safetensors", "numpy"}),
    }


def _describe(path: str) -> dict[str, Any]:
    available = available_memory()
    return {
        "cpu": cpu_model(),
        "cpus": usable_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
        "available_bytes": available.bytes,
        "available_limit": available.limit,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "filesystem": filesystem_of(path),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "commit": _commit(),
    }


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in sorted(packages):
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
