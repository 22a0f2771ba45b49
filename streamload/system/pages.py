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
import sys
from functools import lru_cache
from typing import Any

import torch

_MADV_POPULATE_WRITE = 23
# Below this a few faults are cheaper than a call.
_LEAST_BYTES = 128 << 10
_PAGE = mmap.PAGESIZE
# Below this, pages that are not full weigh more than what malloc keeps.
_LEAST_MAPPED_BYTES = 256 << 10


@lru_cache(maxsize=1)
def _madvise() -> Any:
    """The C library's ``madvise``, or None where there is no such call."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


def populate(address: int, nbytes: int) -> None:
    """Make the whole pages inside [address, address + nbytes) present; contents stay.

    Only a hint: any refusal (an older kernel, a memory limit) leaves the pages to be made, or the
    limit to be met, when they are written.
    """
    start = -(-address // _PAGE) * _PAGE
    stop = (address + nbytes) // _PAGE * _PAGE
    if stop - start < _LEAST_BYTES:
        return
    madvise = _madvise()
    if madvise is not None:
        madvise(start, stop - start, _MADV_POPULATE_WRITE)


def empty_pages(
    shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor in host memory, its values not set; dense, contiguous without ``strides``."""
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if nbytes < _LEAST_MAPPED_BYTES:
        flat = torch.empty(count, dtype=dtype, device="cpu")
    else:
        flat = torch.frombuffer(_anonymous(nbytes), dtype=dtype, count=count)
    return flat.view(shape) if strides is None else torch.as_strided(flat, shape, strides)


def _anonymous(nbytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    # Private, or it would count as shared memory.
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
