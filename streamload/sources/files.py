"""One open file that is read in blocks: identity, positioned reads, page-cache hints.

``os.preadv`` fills a buffer without the GIL and without a shared offset; where it or
``posix_fadvise`` is missing (macOS, Windows) a locked ``seek`` + ``readinto`` does the same.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from streamload.core.errors import CheckpointError, CheckpointNotFoundError, ReadError
from streamload.sources.remote.urls import is_url
from streamload.system.descriptors import LateFile, too_many_open
from streamload.system.filesystems import reason_to_read

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamload.sources.remote.remote_file import RemoteFile

# One system call moves at most 2 GiB - 4 KiB on Linux.
_MAX_READ_BYTES = 1 << 30
_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    # Opening a FIFO must not wait for a writer; it is refused below.
    | getattr(os, "O_NONBLOCK", 0)
)

_CHANGED = "the file was changed or replaced while it was read; load it again"


class Readable(Protocol):
    """A file, or a part of one, that headers are read from.

    Attributes:
        path: of the file, for messages.
        size_bytes: of the file or the part.
        is_remote: it is read over a network.
    """

    @property
    def path(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def is_remote(self) -> bool: ...

    def read(self, offset: int, nbytes: int) -> bytes: ...

    def advise(self, offset: int, nbytes: int, *, needed: bool) -> None: ...

    def read_into(self, offset: int, buffer: memoryview, *, tensor: str | None = None) -> None: ...


class ReadableFile(ABC):
    """A file that is read in ranges, wherever it is; ``open_file`` makes one.

    Attributes:
        path: appears in messages and in ``Extent.file``.
        size_bytes: its length.
        is_remote: it is read over a network.
    """

    path: str
    size_bytes: int
    is_remote = False

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview, *, tensor: str | None = None) -> None:
        """Fill all of ``buffer`` from ``offset``; the buffer is the caller's throughout.

        Raises:
            ReadError: reading failed, or the file ends before the buffer is full.
        """

    def read(self, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes from ``offset``; for headers and other small parts."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def advise(self, offset: int, nbytes: int, *, needed: bool) -> None:  # noqa: B027  # a hint
        """Tell that a range is needed soon, or not any more. Never fails."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise ReadError if the file was cut, written or replaced since it was opened."""

    @abstractmethod
    def reason_to_read(self, kinds: dict[int, str]) -> str:
        """Why it is better read than mapped; see ``reason_to_read`` (system/filesystems)."""

    def interrupt(self) -> None:  # noqa: B027  # a disk answers soon
        """Have reads that wait for a server give up."""

    @abstractmethod
    def close(self) -> None:
        """Close it for good; twice is allowed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class OpenFile(LateFile, ReadableFile):
    """One regular file, for reading only; ``path`` is as it was given.

    Raises:
        CheckpointNotFoundError: there is nothing at the path.
        CheckpointError: it is not a regular file, or may not be read.
    """

    flags = _OPEN_FLAGS
    _identity: tuple[int, ...] = ()

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # Opened again later, wherever the process is by then.
            is_whole = os.path.isabs(path) or not path
            self._place = path if is_whole else os.path.join(os.getcwd(), path)
            with self.descriptor() as descriptor:
                self.status = os.fstat(descriptor)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(_absent(path), path=path) from error
        except (OSError, ValueError) as error:
            reason = too_many_open(error) or getattr(error, "strerror", None) or str(error)
            raise CheckpointError(f"cannot be opened: {reason}", path=path) from error
        if not stat.S_ISREG(self.status.st_mode):
            self.close()
            kind = "a folder" if stat.S_ISDIR(self.status.st_mode) else "not a regular file"
            raise CheckpointError(f"is {kind}, expected a checkpoint file", path=path)
        self.size_bytes = self.status.st_size
        self._identity = identity_of(self.status)
        self._lock = threading.Lock()

    def _open(self) -> int:
        descriptor = os.open(self._place, self.flags)
        if self._identity and not self._is_same(os.fstat(descriptor)):
            os.close(descriptor)
            raise OSError(errno.ESTALE, _CHANGED)
        return descriptor

    def read_into(self, offset: int, buffer: memoryview, *, tensor: str | None = None) -> None:
        done, total = 0, buffer.nbytes
        while done < total:
            block = buffer[done : done + _MAX_READ_BYTES]
            try:
                count = self._read_once(block, offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                reason = too_many_open(error) or error.strerror or str(error)
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

    def read_rows(
        self,
        offset: int,
        row_bytes: int,
        stride_bytes: int,
        buffer: memoryview,
        *,
        tensor: str | None = None,
    ) -> None:
        """Fill ``buffer`` with rows of ``row_bytes``, the first from ``offset``, end to end.

        Raises:
            ReadError: as ``read_into``.
        """
        at, preadv = 0, getattr(os, "preadv", None)
        while at < buffer.nbytes:
            with suppress(OSError), self.descriptor() as descriptor:  # told below, if it lasts
                while preadv is not None and at < buffer.nbytes:
                    row = buffer[at : at + row_bytes]
                    if preadv(descriptor, (row,), offset) < len(row):
                        break
                    at += row_bytes
                    offset += stride_bytes
            if at < buffer.nbytes:
                self.read_into(offset, buffer[at : at + row_bytes], tensor=tensor)
                at += row_bytes
                offset += stride_bytes

    def _read_once(self, block: memoryview, offset: int) -> int:
        with self.descriptor() as descriptor:
            if hasattr(os, "preadv"):
                return os.preadv(descriptor, [block], offset)
            with self._lock:  # the descriptor's offset is shared between threads
                os.lseek(descriptor, offset, os.SEEK_SET)
                data = os.read(descriptor, min(block.nbytes, 8 << 20))
                block[: len(data)] = data
                return len(data)

    def advise(self, offset: int, nbytes: int, *, needed: bool) -> None:
        if nbytes <= 0 or not hasattr(os, "posix_fadvise"):
            return
        advice = os.POSIX_FADV_WILLNEED if needed else os.POSIX_FADV_DONTNEED
        try:
            with self.descriptor() as descriptor:
                os.posix_fadvise(descriptor, offset, nbytes, advice)
        except OSError:
            return  # a hint: file systems without it just read as they read

    def allow_touching(self) -> None:
        """From now on the file counts as unchanged if only its ctime is another."""
        self._identity = self._identity[:-1]

    def _is_same(self, status: os.stat_result) -> bool:
        return identity_of(status)[: len(self._identity)] == self._identity

    def reason_to_read(self, kinds: dict[int, str]) -> str:
        try:
            with self.descriptor() as descriptor:
                return reason_to_read(self.path, descriptor, kinds)
        except OSError:
            return ""

    def check_unchanged(self) -> None:
        try:
            at_path = os.stat(self._place)
        except OSError as error:
            raise ReadError(
                f"the file went away while it was read: {error.strerror}",
                path=self.path,
                errno=error.errno,
            ) from error
        if not self._is_same(at_path):
            raise ReadError(_CHANGED, path=self.path, errno=errno.ESTALE)


@dataclass(frozen=True, slots=True)
class FilePart:
    """``size_bytes`` bytes of a file from ``start`` on, read as if they were a file themselves."""

    file: ReadableFile
    start: int
    size_bytes: int

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def is_remote(self) -> bool:
        return self.file.is_remote

    def advise(self, offset: int, nbytes: int, *, needed: bool) -> None:
        """As ``ReadableFile.advise``, from the part's own first byte."""
        self.file.advise(self.start + offset, nbytes, needed=needed)

    def read(self, offset: int, nbytes: int) -> bytes:
        """As ``ReadableFile.read``, from the part's own first byte."""
        return self.file.read(self.start + offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview, *, tensor: str | None = None) -> None:
        """As ``ReadableFile.read_into``, from the part's own first byte."""
        self.file.read_into(self.start + offset, buffer, tensor=tensor)


def open_file(path: str) -> OpenFile | RemoteFile:
    """The file at a path or address.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: it is not a file that can be read, or a server refuses it.
        MissingExtraError: a bucket is read with what the extra ``remote`` brings.
    """
    if not is_url(path):
        return OpenFile(path)
    from streamload.sources.remote.remote_file import RemoteFile

    return RemoteFile(path)


def _absent(path: str) -> str:
    if os.path.islink(path):
        return f"is a link to {os.readlink(path)!r}, which does not exist"
    return "no such file or folder"


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    """What is another for another file, and after any writing to this one.

    Size and time of the last writing are easily the same, as after ``cp -p``, and an inode is used
    again; the time of the last change (ctime, last) is the system's alone. Where a network file
    system has none, the others remain.
    """
    ours = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return *ours, status.st_ctime_ns
