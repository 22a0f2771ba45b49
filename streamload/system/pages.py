"""Pages from the kernel: a run of fresh ones at once, and memory that is given back at once.

The first touch of new memory is the largest cost of a load: 4 KiB at a time, each by an exception.
``MADV_POPULATE_WRITE`` (Linux 5.14) makes the same pages in one call, at about four fifths of the
price. Elsewhere, or where the kernel refuses, pages come one by one as ever.

What malloc hands out in pieces of some megabytes it keeps when they are freed, and small things
that live on between them keep it from ever giving them back. Buffers, and tensors that come and
go, are therefore mapped one by one (``empty_pages``).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
# Below this a few faults are cheaper than a call.
_LEAST_BYTES = 128 << 10
_PAGE = mmap.PAGESIZE
# Below this, pages that are not full weigh more than what malloc keeps.
_LEAST_MAPPED_BYTES = 256 << 10


@lru_cache(maxsize=2)
def _call(name: str, last: Any) -> Any:
    """``madvise`` or ``mincore`` of the C library, or None where there is no such call."""
    if sys.platform != "linux":
        return None
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, last)
    function.restype = ctypes.c_int
    return function


def populate(address: int, nbytes: int, *, to_read: bool = False) -> None:
    """Make the whole pages inside [address, address + nbytes) present; contents stay.

    ``to_read``: those of a mapped file, as they are in it.

    Only a hint: any refusal (an older kernel, a memory limit) leaves the pages to be made, or the
    limit to be met, when they are written.
    """
    start = -(-address // _PAGE) * _PAGE
    stop = (address + nbytes) // _PAGE * _PAGE
    if stop - start < _LEAST_BYTES:
        return
    madvise = _call("madvise", ctypes.c_int)
    if madvise is not None:
        madvise(start, stop - start, _MADV_POPULATE_READ if to_read else _MADV_POPULATE_WRITE)


def are_resident(address: int, nbytes: int) -> bool:
    """True if all pages of a mapped range are in memory; ``address`` is that of a page.

    The kernel tells who may not write to a file that all of it is.
    """
    mincore = _call("mincore", ctypes.c_char_p)
    if mincore is None:
        return False
    pages = ctypes.create_string_buffer(-(-nbytes // _PAGE))
    if mincore(address, nbytes, pages) != 0:
        return False
    # Only the lowest bit of each byte is defined; today's kernels set no other.
    return b"\0" not in pages.raw


def was_written(address: int, nbytes: int) -> bool:
    """True if a page of a private mapping was written to, and so is the file's no longer.

    proc(5), ``/proc/PID/pagemap``: of each page's eight bytes the highest has bit 7 if it is in
    memory, 6 if it is swapped out, and 5 if it is that of a file.
    """
    first, last = address // _PAGE, (address + nbytes - 1) // _PAGE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            found = os.pread(file.fileno(), (last + 1 - first) * 8, first * 8)
    except OSError:  # no such system, or not told
        return False
    return any(flags & 0b1100_0000 and not flags & 0b0010_0000 for flags in set(found[7::8]))


def empty_pages(
    shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor in host memory, its values not set; dense, contiguous without ``strides``."""
    import torch

    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if nbytes < _LEAST_MAPPED_BYTES:
        flat = torch.empty(count, dtype=dtype, device="cpu")
    else:
        memory = _take_offered(nbytes) or anonymous_pages(nbytes)
        flat = torch.frombuffer(memory, dtype=dtype, count=count)
    return flat.view(shape) if strides is None else torch.as_strided(flat, shape, strides)


def anonymous_pages(nbytes: int) -> mmap.mmap:
    """Fresh memory of its own, which goes back to the system when nothing refers to it."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    # Private, or it would count as shared memory.
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


# Memory that was made before it is asked for, by its size.
_offered: dict[int, list[mmap.mmap]] = {}
_ahead = [0, 0]
_lock = threading.Lock()


def offer_pages(nbytes: int) -> mmap.mmap | None:
    """Memory that the next tensor of this size gets; the caller may populate it.

    None if tensors of that size are not mapped one by one.
    """
    if nbytes < _LEAST_MAPPED_BYTES:
        return None
    memory = anonymous_pages(nbytes)
    with _lock:
        _offered.setdefault(nbytes, []).append(memory)
    return memory


def note_ahead(*, anonymous_bytes: int = 0, file_bytes: int = 0) -> None:
    """So much was made present for a load that has not begun; its report counts it as its own."""
    with _lock:
        _ahead[0] += anonymous_bytes
        _ahead[1] += file_bytes


def made_ahead() -> tuple[int, int]:
    """Anonymous bytes and those of files that were made ahead; told once."""
    with _lock:
        found = _ahead[0], _ahead[1]
        _ahead[:] = [0, 0]
        return found


def withdraw_pages() -> None:
    """What was offered and not taken goes back to the system."""
    with _lock:
        _offered.clear()


def are_offered(nbytes: int) -> bool:
    """True if ``empty_pages`` of this size would get memory that was made ahead."""
    return bool(_offered.get(nbytes))


def _take_offered(nbytes: int) -> mmap.mmap | None:
    with _lock:
        of_size = _offered.get(nbytes)
        return of_size.pop(0) if of_size else None
