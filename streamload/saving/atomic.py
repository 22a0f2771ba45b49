"""New files beside the old ones, put in place whole or not at all.

Everything is written in a workplace beside its destination, synced, then renamed. Of several that
write to one place each puts a whole result there, and the last one's stays.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

from streamload.core.errors import WriteError
from streamload.core.wording import listed, printable
from streamload.saving.workplace import Workplace, remove_leftovers, whole_path
from streamload.system.descriptors import LateFile, too_many_open

_GIB = 1 << 30


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


def notices_of(problems: Iterable[str], replaced: Sequence[str]) -> list[str]:
    """What is to be said of files that were put in place.

    Args:
        problems: with locks; empty ones are left out.
        replaced: names that are another writer's by now.
    """
    said = [problem for problem in dict.fromkeys(problems) if problem]
    if replaced:
        names = listed(map(printable, replaced))
        said.append(f"written, but replaced by another process since: {names}")
    return said


class StagedFile(LateFile):
    """A file under a temporary name; ``commit`` gives it its own, ``discard`` removes it.

    Args:
        path: its name in the end.
        durable: bring it to the disk before it gets its name.
        is_private: for this user alone; else as the umask has it, and as the older file was.
        place: where it is meanwhile, and its name there: a workplace that it shares. Without one
            it has its own.
    """

    def __init__(
        self,
        path: str,
        *,
        durable: bool = True,
        is_private: bool = False,
        place: tuple[Workplace, str] | None = None,
    ) -> None:
        self.path = path
        self._durable = durable
        self._is_private = is_private
        self._took_a_free_name = False
        self._identity: os.stat_result | None = None
        self._has_own_place = place is None
        with translated(self.path):
            self._folder = whole_path(os.path.dirname(path))
            folder, name = os.path.split(path)
            self._workplace, self._name = place or (Workplace(folder, name), name)
            self._flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            try:
                with self.descriptor():  # makes it
                    self._flags = os.O_RDWR
            except BaseException:
                self.discard()
                raise

    @property
    def _place(self) -> str:
        return os.path.join(self._folder, os.path.basename(self.path))

    @property
    def temporary(self) -> str:
        """A path to it, for writers that take nothing else; it must stay the same file."""
        return self._workplace.way_to(self._name)

    def notices(self, *problems: str) -> list[str]:
        """What is to be said once it is in place; ``problems`` are the caller's."""
        replaced = [] if self.is_in_place() else [os.path.basename(self.path)]
        return notices_of([self._workplace.problem, *problems], replaced)

    def _open(self) -> int:
        mode = 0o600 if self._is_private else 0o666
        return self._workplace.open(self._name, self._flags, mode)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data)
        with translated(self.path), self.descriptor() as descriptor:
            done = 0
            while done < len(view):
                done += _pwrite(descriptor, view[done : done + (8 << 20)], offset + done)

    def finish(self) -> None:
        """Bring everything to the disk and close the file; once is enough."""
        if self._is_closed:
            return
        with translated(self.path):
            with self.descriptor() as descriptor:
                if self._durable:
                    os.fsync(descriptor)
                self._identity = os.fstat(descriptor)
            self.close()

    def commit(self) -> None:
        """Give the file its name; an older file of that name is replaced at one stroke.

        A link of that name is replaced, and what it leads to is left alone.
        """
        self.finish()
        with translated(self.path):
            is_free = not os.path.lexists(self._place)
            self._workplace.put_in_place(self._name, self._place, keeps_mode=not self._is_private)
            self._took_a_free_name = is_free
        if self._durable:
            sync_folder(self._folder)
        if self._has_own_place:
            self._workplace.remove()

    def is_in_place(self) -> bool:
        """True after ``commit``, until another file has the name."""
        with suppress(OSError):
            return self._identity is not None and os.path.samestat(
                self._identity, os.lstat(self._place)
            )
        return False

    def discard(self) -> None:
        """Remove the temporary; the file of that name, if any, is as it was."""
        self.close()
        if self._has_own_place:
            self._workplace.remove()
        else:
            self._workplace.unlink(self._name)

    def take_back(self) -> None:
        """Undo ``commit``, if there was no older file of that name, nor another now."""
        if self._took_a_free_name and self.is_in_place():
            with suppress(OSError):  # not ours to remove
                os.unlink(self._place)
        self._took_a_free_name = False


def staged_file(path: str, nbytes: int, *, is_private: bool = False) -> StagedFile:
    """A StagedFile of ``nbytes`` bytes; its folder is made, and what killed runs left there goes.

    Raises:
        WriteError: there is too little room, or nothing can be written there.
    """
    folder = os.path.dirname(path) or os.curdir
    remove_leftovers(folder)
    check_space(folder, nbytes, path=path)
    with translated(path):
        os.makedirs(folder, exist_ok=True)
    return StagedFile(path, is_private=is_private)


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
