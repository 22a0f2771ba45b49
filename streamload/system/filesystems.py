"""Whether a file may well be mapped: not across a network, and not while others write to it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import lru_cache

# Pages come across a network or through another process, one fault at a time; and what a server
# takes back under a mapping kills the process.
_NETWORKS = ("nfs", "cifs", "smb", "9p", "afs", "coda", "ncpfs", "webdav", "drvfs", "virtiofs")
_CLUSTERS = ("beegfs", "ceph", "gfs2", "glusterfs", "gpfs", "lustre", "ocfs2", "orangefs", "pvfs2")
_REMOTE = (*_NETWORKS, *_CLUSTERS, "fuse")


def reason_to_read(path: str, descriptor: int) -> str:
    """Why the file is better read than mapped, in words; ``""`` if nothing speaks against it.

    Args:
        path: of the file.
        descriptor: of the file, open for reading.
    """
    if sys.platform == "win32":
        return "Windows lets nobody replace a file that is mapped"
    kind = _kinds().get(os.fstat(descriptor).st_dev, "")
    if kind.startswith(_REMOTE):
        return f"{path} is on a file system of kind {kind}"
    return f"{path} is open for writing elsewhere" if _is_written(descriptor) else ""


@lru_cache(maxsize=1)
def _kinds() -> dict[int, str]:
    """Device number → kind of its file system, as Linux tells; empty elsewhere."""
    kinds = {}
    with suppress(OSError), open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            fields = line.decode("utf-8", "replace").split()
            with suppress(ValueError, IndexError):
                major, minor = fields[2].split(":")
                kinds[os.makedev(int(major), int(minor))] = fields[fields.index("-") + 1]
    return kinds


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
