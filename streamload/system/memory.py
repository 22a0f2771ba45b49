"""How much memory this process can still allocate. No torch import.

The limits are in ``/proc/meminfo``, ``RLIMIT_AS`` and every control group above the process.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from streamload.system.cgroups import cgroups, key_values


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """What can still be allocated, and which limit says so: ``"machine"`` or ``"cgroup"``."""

    bytes: int
    limit: str


def available_memory(*, root: str = "/") -> AvailableMemory:
    """What this process can still allocate before a limit stops it.

    The smallest of: the machine's MemAvailable, the room in every control group from the
    process's own up to the root (file pages that can be dropped count as free), and the address
    space left under ``RLIMIT_AS``.

    Args:
        root: folder under which ``proc`` and the control groups lie.
    """
    best = AvailableMemory(min(_free_bytes(root), _address_space_left(root)), "machine")
    for group in cgroups(root):
        room = group.room()
        if room is not None and room < best.bytes:
            best = AvailableMemory(room, "cgroup")
    return best


def _free_bytes(root: str) -> int:
    # Where /proc answers it is read directly: importing psutil takes longer than a mapped load.
    fields = key_values(os.path.join(root, "proc/meminfo"))
    if "MemAvailable:" in fields:
        return fields["MemAvailable:"] << 10
    if "MemFree:" in fields:  # kernels before 3.14
        return (fields["MemFree:"] + fields.get("Cached:", 0)) << 10
    import psutil

    return int(psutil.virtual_memory().available)


def _address_space_left(root: str) -> int:
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    used = key_values(os.path.join(root, "proc/self/status")).get("VmSize:", 0) << 10
    return max(0, limit - used)
