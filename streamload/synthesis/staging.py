"""Files that appear whole or not at all: temporaries beside their targets, renamed together."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any

from streamload.core.errors import WriteError

__all__ = ["StagedFiles", "check_free_space"]

_GIB = 1 << 30


class StagedFiles:
    """Writes several files of one folder; leaving the context normally puts them in place.

    An exception, Ctrl-C included, removes what was written, and the folder if it was made here;
    files that were there before stay as they were.

    Raises:
        WriteError: the folder cannot be made or written.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._made: list[str] = []
        self._staged: list[tuple[str, str]] = []

    def __enter__(self) -> StagedFiles:
        return self

    def reserve(self, name: str) -> str:
        """Path of a new empty file that becomes ``name`` (its subfolders are made)."""
        target = os.path.join(self._folder, name)
        with _as_write_error(target):
            folder = os.path.dirname(target) or "."
            self._make_folder(folder)
            descriptor, temporary = tempfile.mkstemp(
                prefix=f".{os.path.basename(name)}.", suffix=".tmp", dir=folder
            )
            self._staged.append((temporary, target))
            os.close(descriptor)
        return temporary

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """A new unbuffered binary file that becomes ``name``."""
        temporary = self.reserve(name)
        with (
            _as_write_error(os.path.join(self._folder, name)),
            open(temporary, "wb", buffering=0) as file,
        ):
            yield file

    def write(self, name: str, data: bytes) -> None:
        """A whole small file."""
        with self.open(name) as file:
            file.write(data)

    def _make_folder(self, folder: str) -> None:
        missing: list[str] = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder) or "."
        for path in reversed(missing):
            os.mkdir(path)
            self._made.append(path)

    def _put_in_place(self) -> None:
        mode = 0o666 & ~_umask()
        while self._staged:
            temporary, target = self._staged[0]
            with _as_write_error(target):
                os.chmod(temporary, mode)  # mkstemp's files are for their owner only
                os.replace(temporary, target)
            del self._staged[0]

    def _discard(self) -> None:
        for temporary, _ in self._staged:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # not empty: some of it is in place
                os.rmdir(folder)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._put_in_place()
        finally:
            if self._staged:
                self._discard()


@contextlib.contextmanager
def _as_write_error(path: str) -> Iterator[None]:
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteError(f"writing failed: {reason}", path=path, errno=error.errno) from error


def write_all(file: IO[bytes], block: Any) -> None:
    """Write the whole buffer to an unbuffered file, which may take it in parts."""
    view = memoryview(block).cast("B")
    while view.nbytes:
        view = view[file.write(view) :]


def check_free_space(folder: str, needed_bytes: int) -> None:
    """Refuse before anything is written.

    Raises:
        WriteError: the disk that holds ``folder`` has less than ``needed_bytes`` free.
    """
    existing = os.path.abspath(folder)
    while not os.path.isdir(existing) and os.path.dirname(existing) != existing:
        existing = os.path.dirname(existing)
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise WriteError(
            f"not enough disk space: needs {needed_bytes / _GIB:.2f} GiB, "
            f"{free / _GIB:.2f} GiB free",
            path=folder,
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
