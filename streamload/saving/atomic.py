"""New files beside the old ones, put in place whole or not at all.

Everything is written under temporary names in the destination's own folder, synced, then renamed.
Names carry the process's id, so that what a killed run left behind is known and cleaned up.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

from streamload.core.errors import WriteError
from streamload.system.descriptors import LateFile, too_many_open

_GIB = 1 << 30
_PREFIX = ".streamload-"
_NUMBERS = itertools.count()  # two threads that write one file must not share a temporary


@contextmanager
def translated(path: str) -> Iterator[None]:
    """OSErrors become WriteErrors that name ``path``, as does a path that no system takes."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        reason = too_many_open(error) or error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = f"no room: {reason}"
        raise WriteError(
            f"cannot be written: {reason}; what was there before is whole",
            path=path,
            errno=error.errno,
        ) from error
    except ValueError as error:  # a NUL byte, or a surrogate that stands alone
        raise WriteError(f"cannot be written: {error}", path=path) from error


def temporary_name(path: str) -> str:
    """A name in the same folder that no reader takes for a checkpoint."""
    folder, name = os.path.split(path)
    # Cut, as the whole name must not be over 255 bytes.
    start = f"{_PREFIX}{os.getpid()}-{next(_NUMBERS)}-"
    kept = os.fsencode(name)[:128].decode("utf-8", "ignore")
    return os.path.join(folder, f"{start}{kept}.tmp")


def remove_leftovers(folder: str) -> None:
    """Remove temporaries of runs that are gone; those of living processes are left alone."""
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):  # ValueError: no system takes such a path
        return
    for name in names:
        owner = name.removeprefix(_PREFIX).partition("-")[0] if name.startswith(_PREFIX) else ""
        if not owner.isdigit() or not name.endswith(".tmp") or _is_alive(int(owner)):
            continue
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            _unlink(path)


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # another user's, or not to be told on this system
    return True


def _unlink(path: str) -> None:
    with suppress(OSError):  # gone already, or not ours to remove
        os.unlink(path)


def check_space(folder: str, needed_bytes: int, *, path: str | None = None) -> None:
    """Refuse before anything is written; ``folder`` need not be there yet.

    Raises:
        WriteError: about ``path``; the file system has less than ``needed_bytes`` free.
    """
    existing = os.path.abspath(folder)
    while not os.path.isdir(existing) and os.path.dirname(existing) != existing:
        existing = os.path.dirname(existing)
    with translated(folder):
        free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise WriteError(
            f"no room: needs {needed_bytes / _GIB:.2f} GiB, {free / _GIB:.2f} GiB free "
            f"({needed_bytes} bytes are needed, {free} are free)",
            path=folder if path is None else path,
            errno=errno.ENOSPC,
        )


def put_in_place(temporary: str, path: str) -> None:
    """Rename a whole file; an older one of that name is replaced at one stroke."""
    with suppress(OSError):  # there may be no older file
        os.chmod(temporary, stat.S_IMODE(os.stat(path).st_mode))
    os.replace(temporary, path)


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """One process at a time puts files in place there; where there are no locks, none waits."""
    descriptor = -1
    with suppress(ImportError, OSError):
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class StagedFile(LateFile):
    """A file under a temporary name; ``commit`` gives it its own, ``discard`` removes it.

    Args:
        path: its name in the end.
        shown: the path for messages, where ``path`` lies in a folder that is temporary itself.
        durable: bring it to the disk before it gets its name.
    """

    def __init__(self, path: str, *, shown: str | None = None, durable: bool = True) -> None:
        self.path = path
        self.shown = path if shown is None else shown
        self._durable = durable
        with translated(self.shown):
            self.temporary = temporary_name(path)
            self._flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
            with self.descriptor():  # makes it
                self._flags = os.O_RDWR | getattr(os, "O_BINARY", 0)
        self._took_a_free_name = False

    def _open(self) -> int:
        return os.open(self.temporary, self._flags, 0o666)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data)
        with translated(self.shown), self.descriptor() as descriptor:
            done = 0
            while done < len(view):
                done += _pwrite(descriptor, view[done : done + (8 << 20)], offset + done)

    def finish(self) -> None:
        """Bring everything to the disk and close the file; once is enough."""
        if self._is_closed:
            return
        with translated(self.shown):
            if self._durable:
                with self.descriptor() as descriptor:
                    os.fsync(descriptor)
            self.close()

    def commit(self) -> None:
        """Give the file its name; an older file of that name is replaced at one stroke."""
        self.finish()
        with translated(self.shown):
            is_free = not os.path.lexists(self.path)
            put_in_place(self.temporary, self.path)
            self._took_a_free_name = is_free
        if self._durable:
            sync_folder(os.path.dirname(self.path) or os.curdir)

    def discard(self) -> None:
        """Remove the temporary; the file of that name, if any, is as it was."""
        self.close()
        _unlink(self.temporary)

    def take_back(self) -> None:
        """Undo ``commit``, if there was no older file of that name."""
        if self._took_a_free_name:
            self._took_a_free_name = False
            _unlink(self.path)


def staged_file(path: str, nbytes: int) -> StagedFile:
    """A StagedFile of ``nbytes`` bytes; its folder is made, and what killed runs left there goes.

    Raises:
        WriteError: there is too little room, or nothing can be written there.
    """
    folder = os.path.dirname(path) or os.curdir
    remove_leftovers(folder)
    check_space(folder, nbytes, path=path)
    with translated(path):
        os.makedirs(folder, exist_ok=True)
    return StagedFile(path)


def _pwrite(descriptor: int, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.write(descriptor, data)


def sync_folder(folder: str) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return
    with suppress(OSError):  # not every file system syncs folders
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Staged(Protocol):
    def commit(self) -> None: ...

    def discard(self) -> None: ...


_T = TypeVar("_T", bound=_Staged)


@contextmanager
def committing(staged: _T) -> Iterator[_T]:
    """Commits a StagedFile or StagedFolder at the end; discards it on any exception instead."""
    try:
        yield staged
        staged.commit()
    except BaseException:
        staged.discard()
        raise
