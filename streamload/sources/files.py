"""One open file that is read in blocks: identity, positioned reads, page-cache hints.

``os.preadv`` fills a buffer without the GIL and without a shared offset; where it or
``posix_fadvise`` is missing (macOS, Windows) a locked ``seek`` + ``readinto`` does the same.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from typing import TYPE_CHECKING

from streamload.core.errors import CheckpointError, CheckpointNotFoundError, ReadError

if TYPE_CHECKING:
    from typing_extensions import Self

# One system call moves at most 2 GiB - 4 KiB on Linux.
_MAX_READ_BYTES = 1 << 30
_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    # Opening a FIFO must not wait for a writer; it is refused below.
    | getattr(os, "O_NONBLOCK", 0)
)


class OpenFile:
    """One regular file, opened for reading only.

    ``path`` is the path as it was given: it appears in messages and in ``Extent.file``.

    Raises:
        CheckpointNotFoundError: there is nothing at the path.
        CheckpointError: it is not a regular file, or may not be read.
    """

    _descriptor = -1

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, _OPEN_FLAGS)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(_absent(path), path=path) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise CheckpointError(f"cannot be opened: {reason}", path=path) from error
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise CheckpointError(f"is {kind}, expected a checkpoint file", path=path)
        self.size_bytes = status.st_size
        self._identity = _identity(status)
        self._lock = threading.Lock()

    def read_into(self, offset: int, buffer: memoryview, *, tensor: str | None = None) -> None:
        """Fill all of ``buffer`` from ``offset``; the buffer is the caller's throughout.

        Raises:
            ReadError: an I/O error, or the file ends before the buffer is full.
        """
        done, total = 0, buffer.nbytes
        while done < total:
            block = buffer[done : done + _MAX_READ_BYTES]
            try:
                count = self._read_once(block, offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                reason = error.strerror or str(error)
                raise ReadError(
                    f"reading failed at byte {offset + done}: {reason}",
                    path=self.path,
                    tensor=tensor,
                    errno=error.errno,
                ) from error
            if count == 0:
                raise ReadError(
                    f"the file ended early: expected {total} bytes from byte {offset}, "
                    f"found {done} (was it cut while it was read?)",
                    path=self.path,
                    tensor=tensor,
                    errno=errno.EIO,
                )
            done += count

    def _read_once(self, block: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [block], offset)
        with self._lock:  # the descriptor's offset is shared between threads
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            data = os.read(self._descriptor, min(block.nbytes, 8 << 20))
            block[: len(data)] = data
            return len(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes from ``offset``; for headers and other small parts."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def advise(self, offset: int, nbytes: int, *, needed: bool) -> None:
        """Tell the page cache that a range is needed soon, or not any more. Never fails."""
        if nbytes <= 0 or not hasattr(os, "posix_fadvise"):
            return
        advice = os.POSIX_FADV_WILLNEED if needed else os.POSIX_FADV_DONTNEED
        try:
            os.posix_fadvise(self._descriptor, offset, nbytes, advice)
        except OSError:
            return  # a hint: file systems without it just read as they read

    def check_unchanged(self) -> None:
        """Raise ReadError if the file was cut, written or replaced since it was opened."""
        try:
            now, at_path = os.fstat(self._descriptor), os.stat(self.path)
        except OSError as error:
            raise ReadError(
                f"the file went away while it was read: {error.strerror}",
                path=self.path,
                errno=error.errno,
            ) from error
        if _identity(now) != self._identity or _identity(at_path) != self._identity:
            raise ReadError(
                "the file was changed or replaced while it was read; load it again",
                path=self.path,
                errno=errno.ESTALE,
            )

    def fileno(self) -> int:
        """The descriptor, for mapping; owned by this object."""
        return self._descriptor

    def close(self) -> None:
        """Close the descriptor; twice is allowed."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _absent(path: str) -> str:
    if os.path.islink(path):
        return f"is a link to {os.readlink(path)!r}, which does not exist"
    return "no such file or folder"


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
