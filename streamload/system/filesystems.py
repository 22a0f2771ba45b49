"""Which file system a file is on, and whether it may well be mapped."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress

# Pages come across a network or through another process, one fault at a time; and what a server
# takes back under a mapping kills the process.
_NETWORKS = ("nfs", "cifs", "smb", "9p", "afs", "coda", "ncpfs", "webdav", "drvfs", "virtiofs")
_CLUSTERS = ("beegfs", "ceph", "gfs2", "glusterfs", "gpfs", "lustre", "ocfs2", "orangefs", "pvfs2")


def is_network(kind: str) -> bool:
    """True for file systems that are elsewhere, or behind another process (FUSE)."""
    return kind.startswith((*_NETWORKS, *_CLUSTERS, "fuse"))


def filesystem_of(path: str) -> str | None:
    """The kind of file system that holds ``path`` (``ext4``, ``nfs4``), or None if not told."""
    path = os.path.join(os.path.realpath(path), "")
    above = [found for found in _mounts() if path.startswith(os.path.join(found[0], ""))]
    # Of two at one point the later one shows.
    nearest = max(reversed(above), key=lambda found: len(found[0]), default=None)
    return nearest and nearest[1]


def reason_to_read(path: str, descriptor: int, kinds: dict[int, str]) -> str:
    """Why the file is better read than mapped, in words; ``""`` if nothing speaks against it.

    Args:
        path: of the file.
        descriptor: of the file, open for reading.
        kinds: of file systems by device number, as they are found; the caller's, for all its files.
    """
    if sys.platform == "win32":
        return "Windows lets nobody replace a file that is mapped"
    device = os.fstat(descriptor).st_dev
    if device not in kinds:
        kinds[device] = filesystem_of(path) or ""
    if is_network(kinds[device]):
        return f"{path} is on a file system of kind {kinds[device]}"
    return f"{path} is open for writing elsewhere" if _is_written(descriptor) else ""


def _mounts() -> Iterator[tuple[str, str]]:
    """Mount points and kinds of file systems."""
    if sys.platform != "linux":
        import psutil

        yield from ((found.mountpoint, found.fstype) for found in psutil.disk_partitions(all=True))
        return
    # Not by psutil, whose import takes longer than a mapped load.
    with suppress(OSError), open("/proc/self/mountinfo", errors="surrogateescape") as table:
        for line in table:
            fields = line.split(" ")
            with suppress(ValueError, IndexError):
                yield _OCTAL.sub(_character, fields[4]), fields[fields.index("-") + 1]


_OCTAL = re.compile(r"\\([0-7]{3})")


def _character(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 8))


def _is_written(descriptor: int) -> bool:
    """True if some process surely has the file open for writing.

    Linux grants a read lease on a file only while nobody can write to it, and only to its owner:
    where it cannot be asked for, nothing is known.
    """
    if sys.platform != "linux":
        return False
    import fcntl
    import signal

    try:
        # A writer who comes within the microseconds of the lease sends this signal, which by
        # default does nothing; the kernel's own choice would end the process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
