"""A folder of one writer's own, beside what it will replace: private, locked, gone at the end.

Its name is random and its files are opened through its descriptor, so that nobody else can put a
link or a file of theirs in the way. The lock lasts as long as the writer; whoever can take it
knows that the writer is gone, and removes what it left.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from contextlib import suppress

from streamload.saving.locks import NO_LINK, Lock, is_at, try_lock, why_unsafe

_PREFIX = ".streamload-"
_ENDING = ".tmp"
_LOCK_NAME = ".streamload.lock"
_TRIES = 100
# Windows opens no folders.
_THROUGH_FOLDERS = {os.open, os.mkdir, os.rename, os.chmod, os.unlink} <= os.supports_dir_fd


def temporary_name(path: str) -> str:
    """A new name in the same folder that no reader takes for a checkpoint."""
    folder, name = os.path.split(path)
    # Cut, as the whole name must not be over 255 bytes.
    kept = os.fsencode(name)[:128].decode("utf-8", "ignore")
    return os.path.join(folder, f"{_PREFIX}{secrets.token_hex(8)}-{kept}{_ENDING}")


def whole_path(path: str) -> str:
    """The path wherever the process is later."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


class Workplace:
    """A private folder for temporary files.

    Args:
        folder: where it is made; must be there.
        name: of what will be put in place, for people who look.

    Attributes:
        problem: a sentence if nothing tells others that this writer lives.

    Raises:
        OSError: none can be made there.
    """

    def __init__(self, folder: str, name: str = "") -> None:
        folder = whole_path(folder)
        self._number = self._lock = -1
        for _ in range(_TRIES):
            self.path = temporary_name(os.path.join(folder, name))
            try:
                os.mkdir(self.path, 0o700)
                if self._occupy():
                    return
            except FileExistsError:
                continue
            except BaseException:
                self.remove()
                raise
        raise OSError(errno.EBUSY, "temporary files are taken away as soon as they are made")

    def _occupy(self) -> bool:
        """Lock it; False if another took it for a leftover just before, or put his in its place."""
        try:
            if _THROUGH_FOLDERS:
                self._number = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | NO_LINK)
            self._lock = self.open(_LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except (FileNotFoundError, FileExistsError, NotADirectoryError):
            self._close()
            return False
        lock = try_lock(self._lock)
        self.problem = why_unsafe(lock)
        if lock is not Lock.HELD and self._is_own():
            return True
        self._close()
        return False

    def _is_own(self) -> bool:
        if self._number < 0:
            return True
        # A user may be mapped to another by the file system: a file made just now says to whom.
        owner = os.fstat(self._lock).st_uid
        return os.fstat(self._number).st_uid == owner and is_at(self.path, self._number)

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """A descriptor of a file in it, never by way of a link."""
        if self._number < 0:
            return os.open(os.path.join(self.path, name), flags | NO_LINK, mode)
        return os.open(name, flags | NO_LINK, mode, dir_fd=self._number)

    def make_folder(self, name: str) -> None:
        """Make a folder in it, and those above it; fine if it is there."""
        made = ""
        for part in name.split(os.sep):
            made = os.path.join(made, part)
            with suppress(FileExistsError):
                if self._number < 0:
                    os.mkdir(os.path.join(self.path, made))
                else:
                    os.mkdir(made, dir_fd=self._number)

    def way_to(self, name: str) -> str:
        """A path to a file in it, for writers that take nothing else."""
        way = f"/proc/self/fd/{self._number}"
        folder = way if self._number >= 0 and os.path.exists(way) else self.path
        return os.path.join(folder, name)

    def put_in_place(self, name: str, path: str, *, keeps_mode: bool) -> None:
        """Rename a whole file; an older one of that name is replaced at one stroke.

        A link at ``path`` is replaced, not what it leads to. With ``keeps_mode`` the new file gets
        the access rights of the old one.
        """
        at = None if self._number < 0 else self._number
        name = name if at is not None else os.path.join(self.path, name)
        if keeps_mode:
            with suppress(OSError):
                status = os.stat(name, dir_fd=at, follow_symlinks=False)
                os.chmod(name, mode_of_old(path, status), dir_fd=at)
        os.replace(name, path, src_dir_fd=at)

    def put_folder_in_place(self, name: str, path: str) -> None:
        """Rename a folder to a name that is free; OSError if it is not."""
        if self._number < 0:
            os.rename(os.path.join(self.path, name), path)
        else:
            os.rename(name, path, src_dir_fd=self._number)

    def unlink(self, name: str) -> None:
        """Remove a file in it, if it is there."""
        with suppress(OSError):
            if self._number < 0:
                os.unlink(os.path.join(self.path, name))
            else:
                os.unlink(name, dir_fd=self._number)

    def remove(self) -> None:
        """Remove it with all that is left in it; may be called again."""
        if self._number >= 0:
            _empty(self.path, self._number)
            self._close()
            return
        self._close()  # first, where open files cannot be removed
        shutil.rmtree(self.path, ignore_errors=True)

    def _close(self) -> None:
        for number in (self._number, self._lock):
            if number >= 0:
                os.close(number)
        self._number = self._lock = -1


def mode_of_old(path: str, new: os.stat_result) -> int:
    """The access rights of the file that ``new`` will replace; its own if there is none."""
    own = stat.S_IMODE(new.st_mode)
    try:
        old = os.lstat(path)
    except OSError:
        return own
    if not stat.S_ISREG(old.st_mode):
        return own
    # Another user's file does not make ours wider than the umask does.
    return stat.S_IMODE(old.st_mode) & (0o777 if old.st_uid == new.st_uid else own)


def remove_leftovers(folder: str) -> None:
    """Remove what writers left that are gone; what a living one holds is left alone."""
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):  # ValueError: no system takes such a path
        return
    for name in names:
        if name.startswith(_PREFIX) and name.endswith(_ENDING):
            with suppress(OSError):  # gone already, or not ours to remove
                _remove_leftover(os.path.join(folder, name))


def _remove_leftover(path: str) -> None:
    number = os.open(path, os.O_RDONLY | NO_LINK)  # no folder where none can be opened
    try:
        mode = os.fstat(number).st_mode
        if stat.S_ISREG(mode) and try_lock(number) is Lock.TAKEN and is_at(path, number):
            os.unlink(path)
        elif stat.S_ISDIR(mode):
            _remove_workplace(path, number)
    finally:
        os.close(number)


def _remove_workplace(path: str, number: int) -> None:
    try:
        lock = os.open(_LOCK_NAME, os.O_RDWR | NO_LINK, dir_fd=number)
    except FileNotFoundError:
        # A writer that has just begun, or is just done. Others' folders are not emptied.
        os.rmdir(path)
        return
    try:
        if try_lock(lock) is Lock.TAKEN:
            _empty(path, number)
    finally:
        os.close(lock)


def _empty(path: str, number: int) -> None:
    """Remove a workplace; its lock goes last, so that a half removed one is known as one."""
    with suppress(OSError, RecursionError):
        # Through the folder that was locked, whatever stands at its path by now.
        _clear(number)
        with suppress(FileNotFoundError):
            os.unlink(_LOCK_NAME, dir_fd=number)
        if is_at(path, number):
            os.rmdir(path)


def _clear(number: int) -> None:
    """Remove all but the lock; links, not what they lead to."""
    for name in os.listdir(number):
        if name == _LOCK_NAME:
            continue
        try:
            os.unlink(name, dir_fd=number)
        except (IsADirectoryError, PermissionError):  # the latter is what macOS says of a folder
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | NO_LINK, dir_fd=number)
            try:
                _clear(inner)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=number)
