"""Locks between all that share a file system: processes, containers, on some also other hosts.

They are flock's: a lock belongs to an open file, not to a process id, so it holds in whatever PID
namespace, and it ends with its process, however that ends. They bind only those who ask for them.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

_LOCK_NAME = ".streamload.lock"
_WAIT_S = 60.0
_PAUSE_S = 0.02
_TRIES = 100
# A link is no file of ours, and opening a FIFO must not wait.
NO_LINK = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


class Lock(Enum):
    """What became of the attempt to lock a file."""

    TAKEN = "taken"
    HELD = "held by another"
    NONE = "there are no locks"


def try_lock(descriptor: int) -> Lock:
    """Lock an open file, without waiting; closing it gives the lock back."""
    try:
        import fcntl
    except ImportError:  # Windows
        return Lock.NONE
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.HELD
    except OSError:  # ENOLCK, EOPNOTSUPP, ENOSYS; for a folder on NFS EBADF
        return Lock.NONE
    return Lock.TAKEN


def is_at(path: str, descriptor: int) -> bool:
    """True if what is open is what stands at ``path``, and not behind a link."""
    try:
        there = os.lstat(path)
    except OSError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def open_own(path: str) -> int | None:
    """Open a file to go on with, or make it, locked for this process alone.

    What stands there and is no plain file of this user's own makes room: a link, one of several
    names of a file, another user's file. Whatever they lead to is not touched.

    Returns:
        The descriptor, for reading and writing; None if another process holds the file.

    Raises:
        OSError: it can be neither opened nor made.
    """
    for _ in range(_TRIES):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK, 0o666)
            is_own = True
        except FileExistsError:
            try:
                if not _is_own(os.lstat(path)):
                    os.unlink(path)
                    continue
                descriptor = os.open(path, os.O_RDWR | NO_LINK)
            except FileNotFoundError:
                continue
            is_own = _is_own(os.fstat(descriptor))
        lock = try_lock(descriptor)
        # Whoever held it may have given it its final name meanwhile.
        if is_own and lock is not Lock.HELD and is_at(path, descriptor):
            return descriptor
        os.close(descriptor)
        if lock is Lock.HELD:
            return None
    raise OSError(errno.EBUSY, "another file is put in its place as soon as it is made")


def _is_own(status: os.stat_result) -> bool:
    user = os.geteuid() if hasattr(os, "geteuid") else status.st_uid
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1 and status.st_uid == user


@contextmanager
def locked(folder: str) -> Iterator[str]:
    """One at a time puts files in place in a folder; gives a sentence if that cannot be had.

    Args:
        folder: must be there. Where a folder cannot be locked (NFS), a file in it is, for as long.
    """
    deadline = time.monotonic() + _WAIT_S
    lock, descriptor = _wait(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0), deadline)
    file = ""
    if lock is Lock.NONE and os.name != "nt":
        _close(descriptor)
        file = os.path.join(folder, _LOCK_NAME)
        lock, descriptor = _wait(file, os.O_RDWR | os.O_CREAT | NO_LINK, deadline)
    try:
        yield why_unsafe(lock)
    finally:
        if file and descriptor >= 0 and lock is not Lock.HELD and is_at(file, descriptor):
            os.unlink(file)
        _close(descriptor)


def _wait(path: str, flags: int, deadline: float) -> tuple[Lock, int]:
    while True:
        try:
            descriptor = os.open(path, flags, 0o666)
            lock = try_lock(descriptor)
        except OSError as error:
            # Another user's lock file may not be opened: it is there, so it is held.
            is_held = error.errno in (errno.EACCES, errno.EPERM) and bool(flags & os.O_CREAT)
            lock, descriptor = Lock.HELD if is_held else Lock.NONE, -1
        is_gone = lock is Lock.TAKEN and bool(flags & os.O_CREAT) and not is_at(path, descriptor)
        if not is_gone and (lock is not Lock.HELD or time.monotonic() > deadline):
            return lock, descriptor
        _close(descriptor)
        if not is_gone:
            time.sleep(_PAUSE_S)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def why_unsafe(lock: Lock) -> str:
    """What is to be said of a lock that was not taken; nothing for one that was."""
    if lock is Lock.HELD:
        return f"the folder has been locked by another process for {_WAIT_S:.0f} s: not waited for"
    if lock is Lock.NONE and os.name != "nt":  # Windows has none at all, which is no news
        return (
            "this file system has no locks: what killed runs leave stays, and two processes that "
            "write to one folder at once may leave files of both"
        )
    return ""
