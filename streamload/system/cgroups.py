"""The control groups above this process, and what they leave of memory. Pure reading.

Both versions of the interface may be mounted, nested, or seen from inside a container
(Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst of the Linux kernel).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

_V1_NO_LIMIT = 1 << 62
"""Version 1 writes 9223372036854771712 (LONG_MAX cut to pages) for "none"; pages may be larger."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One control group's folder, and what its files are called in its version."""

    folder: str
    limit: str
    usage: str
    peak: str
    reclaimable: tuple[str, ...]

    def number(self, name: str) -> int | None:
        """The number in one of the group's files; None for ``max``, or if there is no such."""
        path = os.path.join(self.folder, name)
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
            return int(file.read(64))
        return None

    def room(self) -> int | None:
        """Bytes until the group's limit; None without one."""
        limit = self.number(self.limit)
        used = self.number(self.usage)
        if limit is None or limit >= _V1_NO_LIMIT or used is None:
            return None
        stat = key_values(os.path.join(self.folder, "memory.stat"))
        free = sum(stat.get(key, 0) for key in self.reclaimable)
        return max(0, min(limit, limit - used + free))


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes")
_V1_FILE = ("total_inactive_file", "total_active_file")
_V2 = ("memory.max", "memory.current", "memory.peak")
_V2_FILE = ("inactive_file", "active_file")


def cgroups(root: str) -> Iterator[Cgroup]:
    """Every control group above the process that can limit its memory, own ones first."""
    for version, mount, inside in _memory_mounts(root):
        names, file_keys = (_V1, _V1_FILE) if version == 1 else (_V2, _V2_FILE)
        parts = [part for part in inside.split("/") if part]
        for depth in range(len(parts), -1, -1):
            folder = os.path.join(root, mount.lstrip("/"), *parts[:depth])
            yield Cgroup(folder, *names, file_keys)


def _memory_mounts(root: str) -> Iterator[tuple[int, str, str]]:
    """(version, mount point, path of the process's group below it) of each hierarchy."""
    paths: dict[int, str] = {}
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            paths[1] = path
        elif number == "0" and not controllers:
            paths[2] = path
    for line in _lines(os.path.join(root, "proc/self/mountinfo")):
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 5 or len(right) < 3:
            continue
        version = {"cgroup": 1, "cgroup2": 2}.get(right[0])
        if version is None or version not in paths:
            continue
        if version == 2 or "memory" in right[2].split(","):
            yield version, _unescape(left[4]), _below(paths[version], _unescape(left[3]))


def _below(path: str, mount_root: str) -> str:
    """``path`` seen from a mount of ``mount_root``.

    In a container the mount shows only the container's own group while the path may be the
    host's, or lie outside of the namespace (``/../other``): then the mount itself is the group.
    """
    base = mount_root.rstrip("/")
    if path != base and not path.startswith(base + "/"):
        return ""
    inside = path[len(base) :]
    return "" if ".." in inside.split("/") else inside


def _unescape(text: str) -> str:
    """Undoes mountinfo's octal escapes of space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), text)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []


def key_values(path: str) -> dict[str, int]:
    """First word to the whole number after it, for each line of a file; {} if there is none."""
    pairs = (line.split() for line in _lines(path))
    return {words[0]: int(words[1]) for words in pairs if len(words) > 1 and words[1].isdigit()}
