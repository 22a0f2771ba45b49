"""Mappings of files, private and copy-on-write. No torch import."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from typing import Any

# MAP_NORESERVE is not in the mmap module before Python 3.13; the number is Linux's.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0

# Mappings that were made before they are asked for, by what their files are.
_offered: dict[tuple[int, ...], Any] = {}
_lock = threading.Lock()


def map_file(descriptor: int, nbytes: int) -> Any:
    """The file's bytes as a buffer, unmapped when nothing refers to it any more."""
    if _offered:
        with _lock:
            region = _offered.pop(_identity(descriptor), None)
        if region is not None:
            return region
    return _map(descriptor, nbytes)


def offer_mapping(descriptor: int) -> int | None:
    """Map a file for the next ``map_file`` of it; returns its address, or None where that is not
    told. Valid until ``withdraw_mappings``, and as long as who took it keeps it.
    """
    identity = _identity(descriptor)
    region = _map(descriptor, os.fstat(descriptor).st_size)
    if not isinstance(region, ctypes.Array):
        return None
    with _lock:
        _offered[identity] = region
    return ctypes.addressof(region)


def withdraw_mappings() -> None:
    """Unmap what was offered and not taken."""
    with _lock:
        _offered.clear()


def _identity(descriptor: int) -> tuple[int, ...]:
    found = os.fstat(descriptor)
    ours = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return *ours, found.st_ctime_ns


def _map(descriptor: int, nbytes: int) -> Any:
    """The file's bytes as a buffer, unmapped when nothing refers to it any more."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
    # Python's own mmap object holds a descriptor as long as it lives: one for each shard.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NO_RESERVE
    address = libc.mmap(None, nbytes, access, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    region = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit: tensors may outlive what runs then.
    weakref.finalize(region, libc.munmap, address, nbytes).atexit = False
    return region
