"""What an operation costs, counted: reads, bytes, calls. The same on every machine, busy or not.

Seconds are measured in bench/.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

__all__ = ["Work", "calls_in", "work_done"]


@dataclass
class Work:
    """Reads of checkpoint files, and the most that Python objects held over the start."""

    reads: int = 0
    bytes_read: int = 0
    peak_bytes: int = 0


@contextlib.contextmanager
def work_done() -> Iterator[Work]:
    """Count what is done in the ``with``; the peak is known behind it."""
    work, preadv = Work(), os.preadv

    def counted(*args: object) -> int:
        count = preadv(*args)  # type: ignore[arg-type]
        work.reads += 1
        work.bytes_read += count
        return count

    tracemalloc.start()
    os.preadv = counted  # type: ignore[assignment]
    try:
        start = tracemalloc.get_traced_memory()[0]
        yield work
    finally:
        work.peak_bytes = tracemalloc.get_traced_memory()[1] - start
        os.preadv = preadv
        tracemalloc.stop()


def calls_in(work: Callable[[], object]) -> int:
    """How many functions, Python's and C's, a call calls in this thread."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        del frame, arg
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
