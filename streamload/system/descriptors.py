"""Files opened late and closed early: any number of them, few descriptors at once."""

from __future__ import annotations

import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from typing_extensions import Self

# Enough for workers that read beside each other, and far below any limit.
_MOST_IDLE = 8
_TOO_MANY = (errno.EMFILE, errno.ENFILE)

_lock = threading.RLock()  # a collection may close a file while another is opened
_idle: WeakKeyDictionary[LateFile, None] = WeakKeyDictionary()  # the longest unused first


class LateFile(ABC):
    """One file, with one descriptor at most: opened when it is used, closed when it is idle and
    others need theirs. ``close`` is for good, and may be called twice.
    """

    _number = -1
    _users = 0
    _is_closed = False

    @abstractmethod
    def _open(self) -> int:
        """A new descriptor; OSError if there can be none, or if it is another file by now."""

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """The descriptor, which stays open as long as the context."""
        with _lock:
            if self._is_closed:
                raise OSError(errno.EBADF, "the file was closed")
            while self._number < 0:
                try:
                    self._number = self._open()
                except OSError as error:
                    if error.errno not in _TOO_MANY or not _close_one():
                        raise
            self._users += 1
            _idle.pop(self, None)
        try:
            yield self._number
        finally:
            self._give_back()

    def _give_back(self) -> None:
        with _lock:
            self._users -= 1
            if not self._users:
                _idle[self] = None
                if self._is_closed:
                    self._let_go()
            while len(_idle) > _MOST_IDLE:
                _close_one()

    def close(self) -> None:
        with _lock:
            self._is_closed = True
            if not self._users:
                self._let_go()

    def _let_go(self) -> None:
        _idle.pop(self, None)
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def too_many_open(error: BaseException | None) -> str | None:
    """One sentence if the error is that of too many open files, else None."""
    if not isinstance(error, OSError) or error.errno not in _TOO_MANY:
        return None
    if error.errno == errno.ENFILE:
        return "too many files are open on this machine"
    try:
        import resource
    except ImportError:  # Windows
        return "too many files are open"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"all {most} files that this process may have open are open: raise `ulimit -n {most}`"


def _close_one() -> bool:
    """Close the descriptor that was idle longest; False if none is idle."""
    oldest = next(iter(_idle), None)
    if oldest is None:
        return False
    oldest._let_go()
    return True


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # another thread may have held it when the child was made
    os.register_at_fork(after_in_child=_renew_lock)
