"""Asks the kernel for a run of fresh pages at once instead of by one fault each.

The first touch of new memory is the largest cost of a load: 4 KiB at a time, each by an exception.
``MADV_POPULATE_WRITE`` (Linux 5.14) makes the same pages in one call, at about four fifths of the
price. Elsewhere, or where the kernel refuses, pages come one by one as ever.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import lru_cache
from typing import Any

__all__ = ["populate"]

_MADV_POPULATE_WRITE = 23
# Below this a few faults are cheaper than a call.
_LEAST_BYTES = 128 << 10
_PAGE = mmap.PAGESIZE


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
