"""Making a file cold or warm without root, and looking whether it worked."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable


def drop(paths: Iterable[str]) -> str | None:
    """Asks the system to drop the files' pages; returns why not, or None when they are gone."""
    paths = list(paths)
    if not hasattr(os, "posix_fadvise"):
        return f"no posix_fadvise on {sys.platform}"
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # pages that wait to be written are not dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = resident_fraction(paths)
    if left is None:
        return "could not verify that the pages are gone"
    return f"{left:.0%} of the pages stayed" if left > 0.01 else None


def warm(paths: Iterable[str]) -> None:
    """Reads the files so that the page cache has them, unless it does."""
    for path in paths:
        if resident_fraction([path]) == 1.0:
            continue
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(8 << 20)
            while file.readinto(buffer):
                pass


def resident_fraction(paths: Iterable[str]) -> float | None:
    """What part of the files' pages is in memory, by mincore(2); None where it is not told."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    inside = total = 0
    for path in paths:
        size = os.path.getsize(path)
        if size == 0:
            continue
        pages = -(-size // mmap.PAGESIZE)
        with open(path, "rb") as file:
            view = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        seen = (ctypes.c_ubyte * pages)()
        start = ctypes.c_ubyte.from_buffer(view)
        status = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), seen)
        del start
        view.close()
        if status != 0:
            return None
        inside += bytes(seen).count(1)
        total += pages
    return inside / total if total else 1.0
