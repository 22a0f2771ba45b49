"""Reading a file again and again without its pages piling up in the page cache."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from streamload.core.errors import CheckpointError, ReadError
from streamload.sources.files import OpenFile

# So many reads each way before the faster one is chosen, and how much slower the direct way,
# which takes less of the processor and no page cache, may be all the same.
_TRIES = 8
_FAVOUR = 1.25


class _DirectFile(OpenFile):
    """A file whose bytes come from the disk straight to the buffer (O_DIRECT).

    Offsets, lengths and addresses are those of whole pages; only the file's end may be none.
    """

    flags = OpenFile.flags | getattr(os, "O_DIRECT", 0)

    def read_pages(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``, or as much of it as the file has."""
        done, wanted = 0, min(buffer.nbytes, self.size_bytes - offset)
        while done < wanted:
            with self.descriptor() as descriptor:
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise ReadError("the file ended early", path=self.path)
            done += count


class AgainFile:
    """One file that is read at each pass, in whichever of two ways is the faster here.

    Either directly, or through the page cache, out of which every part is dropped behind the
    reading. What is in the page cache anyway, as another process' pages, is taken from there.

    Raises:
        CheckpointError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._plain = OpenFile(path)
        self._direct: _DirectFile | None = None
        if hasattr(os, "O_DIRECT") and hasattr(os, "preadv"):
            with suppress(CheckpointError):  # not every file system has it
                self._direct = _DirectFile(path)
        self._seconds = {True: 0.0, False: 0.0}
        self._count = {True: 0, False: 0}
        self._lock = threading.Lock()

    def read(self, offset: int, buffer: memoryview, *, is_cached: Callable[[], bool]) -> None:
        """Fill ``buffer`` from ``offset``, or as much of it as the file has; whole pages.

        Raises:
            ReadError, OSError: it cannot be read.
        """
        if is_cached():
            self._read_plain(offset, buffer, keep=True)
            return
        is_direct = self._choose()
        start_s = time.perf_counter()
        if not (is_direct and self._read_directly(offset, buffer)):
            self._read_plain(offset, buffer, keep=False)
        with self._lock:
            self._seconds[is_direct] += (time.perf_counter() - start_s) / max(buffer.nbytes, 1)
            self._count[is_direct] += 1

    def soon(self, offset: int, nbytes: int) -> None:
        """Hint that a range is used soon, through the page cache."""
        self._plain.advise(offset, nbytes, needed=True)

    def close(self) -> None:
        self._plain.close()
        if self._direct is not None:
            self._direct.close()

    def _read_directly(self, offset: int, buffer: memoryview) -> bool:
        """False if the file system says only now that it cannot."""
        file = self._direct
        try:
            if file is not None:
                file.read_pages(offset, buffer)
                return True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = None
        return False

    def _read_plain(self, offset: int, buffer: memoryview, *, keep: bool) -> None:
        nbytes = min(buffer.nbytes, self._plain.size_bytes - offset)
        self._plain.read_into(offset, buffer[:nbytes])
        if not keep:
            self._plain.advise(offset, nbytes, needed=False)

    def _choose(self) -> bool:
        """True for the direct way."""
        if self._direct is None:
            return False
        with self._lock:
            direct, plain = self._count[True], self._count[False]
            if min(direct, plain) < _TRIES:
                return direct <= plain
            rate = self._seconds[True] / direct
            return rate <= _FAVOUR * self._seconds[False] / plain
