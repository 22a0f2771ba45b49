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
from contextlib import contextmanager

from streamload.core.errors import WriteError

__all__ = ["StagedFile", "StagedFolder", "check_space", "remove_leftovers", "translated"]

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
        reason = error.strerror or str(error)
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
    except OSError:
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
    try:
        os.unlink(path)
    except OSError:
        return  # gone already, or not ours to remove


def check_space(folder: str, needed_bytes: int, *, path: str | None = None) -> None:
    """Raise WriteError, about ``path``, if the file system of ``folder`` has too little room."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise WriteError(
            f"no room: {needed_bytes} bytes are needed, {free} are free",
            path=folder if path is None else path,
            errno=errno.ENOSPC,
        )


class StagedFile:
    """A file under a temporary name; ``commit`` gives it its own, ``discard`` removes it.

    ``shown`` is the path for messages, where ``path`` lies in a folder that is temporary itself.
    """

    def __init__(self, path: str, *, shown: str | None = None) -> None:
        self.path = path
        self._shown = path if shown is None else shown
        with translated(self._shown):
            self._temporary = temporary_name(path)
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
            self._descriptor = os.open(self._temporary, flags, 0o666)
        self._open = True
        self._took_a_free_name = False

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data)
        with translated(self._shown):
            done = 0
            while done < len(view):
                done += _pwrite(self._descriptor, view[done : done + (8 << 20)], offset + done)

    def finish(self) -> None:
        """Bring everything to the disk; once is enough."""
        if not self._open:
            return
        with translated(self._shown):
            os.fsync(self._descriptor)
            self._close()

    def commit(self) -> None:
        """Give the file its name; an older file of that name is replaced at one stroke."""
        self.finish()
        with translated(self._shown):
            is_free = not os.path.lexists(self.path)
            _keep_mode(self.path, self._temporary)
            os.replace(self._temporary, self.path)
            self._took_a_free_name = is_free
        _sync_folder(os.path.dirname(self.path) or os.curdir)

    def discard(self) -> None:
        """Remove the temporary; the file of that name, if any, is as it was."""
        if self._open:
            self._close()
        _unlink(self._temporary)

    def take_back(self) -> None:
        """Undo ``commit``, if there was no older file of that name."""
        if self._took_a_free_name:
            self._took_a_free_name = False
            _unlink(self.path)

    def _close(self) -> None:
        self._open = False
        os.close(self._descriptor)


def _pwrite(descriptor: int, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.write(descriptor, data)


def _keep_mode(old: str, new: str) -> None:
    try:
        os.chmod(new, stat.S_IMODE(os.stat(old).st_mode))
    except OSError:
        return  # there is no older file


def _sync_folder(folder: str) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        return  # not every file system syncs folders
    finally:
        os.close(descriptor)


class StagedFolder:
    """Several files that belong together, written into an existing or a new folder.

    A folder that is not there yet appears whole, by one rename. In an existing one the files are
    renamed one by one in the order they were added. The one that seals the set is what makes
    readers see it, so an index goes behind its shards; what fails before it takes all back.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip(os.sep) or path
        self._files: list[StagedFile] = []
        self._seal: StagedFile | None = None
        self._sealed = False
        self._is_new = not os.path.lexists(self.path)
        with translated(self.path):
            self._folder = temporary_name(self.path) if self._is_new else self.path
            parent = os.path.dirname(self.path) or os.curdir
            os.makedirs(parent, exist_ok=True)
            remove_leftovers(parent)
            if self._is_new:
                os.mkdir(self._folder)
            else:
                remove_leftovers(self._folder)

    @property
    def folder(self) -> str:
        """Where files are being written."""
        return self._folder

    def add(self, name: str, *, seals: bool = False) -> StagedFile:
        """A new file of the set; ``seals``: readers see the set once it has its name."""
        given = os.path.join(self.path, name)
        file = StagedFile(os.path.join(self._folder, name), shown=given)
        self._files.append(file)
        if seals:
            self._seal = file
        return file

    def commit(self) -> None:
        """Put all files in place."""
        for file in self._files:
            file.finish()
        for file in self._files:
            file.commit()
            self._sealed |= file is self._seal
        if self._is_new:
            with translated(self.path):
                os.rename(self._folder, self.path)
            _sync_folder(os.path.dirname(self.path) or os.curdir)

    def discard(self) -> None:
        """Remove everything that was written."""
        for file in self._files:
            file.discard()
            if not self._sealed:
                file.take_back()
        if self._is_new:
            shutil.rmtree(self._folder, ignore_errors=True)
