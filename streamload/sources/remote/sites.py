"""The servers that are in use: one ``Site`` each, shared by all files that are read from it.

Elsewhere addresses are printable strings. A site is found by its address as long as any of its
files is open, and knows what they do not hold: credentials, versions, how long to wait.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from streamload.sources.remote.ahead import Ahead
from streamload.sources.remote.answers import (
    Answer,
    BrokenError,
    RefusedError,
    Told,
    Transport,
)
from streamload.sources.remote.urls import Url
from streamload.sources.remote.web_transport import WebTransport

TIMEOUT_S = 60.0
# A connection that brings nothing for this share of the timeout is given up for another one.
_WAITS = 3
_MOST_IN_VAIN = 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_BLOCK_BYTES = 256 << 10
# What opening a file reads of it; of JSON all is wanted, of other files their header's start.
_HEAD_BYTES, _JSON_HEAD_BYTES = 4 << 10, 256 << 10
_MOST_WHOLE_BYTES = 1 << 20

_T = TypeVar("_T")

CHANGED = "the file was changed or replaced on the server while it was read; load it again"


class ChangedError(RefusedError):
    """The file is another one by now."""


class TooLongError(RefusedError):
    """What could have been tried again took too long, or failed too often."""


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a file since it was opened: its length, version and first bytes."""

    size: int
    version: str
    data: bytes = field(repr=False)


class Site:
    """One server, or one bucket, below one folder.

    Args:
        url: of the folder, with the user's secrets.
        timeout_s: how long a range may take to arrive, all attempts included.
        token: a bearer token for this server.
        names: the files in the folder, where they are known.
        address: what was given, in its printable form; the folder itself if nothing.

    Attributes:
        received_bytes: of files, so far.
        answers: how many brought some.
    """

    def __init__(
        self,
        url: Url,
        timeout_s: float,
        *,
        token: str = "",
        names: Sequence[str] | None = None,
        address: str = "",
    ) -> None:
        self.url = url
        self.address = address or url.shown
        self.timeout_s = timeout_s
        self.received_bytes = 0
        self.answers = 0
        self.users = 0
        self._token = token
        self._names = None if names is None else list(names)
        self._heads: dict[str, Head] = {}
        self._absent: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._transport: Transport | None = None
        self._ahead = Ahead(self.fetch)

    def covers(self, url: Url) -> bool:
        """True if a file or folder is to be read through this site."""
        start = self.url.path.rstrip("/")
        is_below = url.path.rstrip("/") == start or url.path.startswith(start + "/")
        if not start and url.is_bucket:
            is_below = True
        same = (url.query, url.user) == (self.url.query, self.url.user)
        return (
            url.origin == self.url.origin
            and is_below
            and (same or not url.has_secrets)
            and not self._closing.is_set()
        )

    def head(self, path: str) -> Head:
        """Open the file at ``path`` (``Url.path``), or say again what that found.

        Raises:
            RefusedError: there is none, or it cannot be read in ranges.
        """
        found = self._heads.get(path)
        if found is not None:
            return found
        if path in self._absent:
            raise RefusedError(self._absent[path], is_absent=True)
        wanted = _JSON_HEAD_BYTES if path.lower().endswith(".json") else _HEAD_BYTES
        try:
            found = self._persist(lambda wait_s, until: self._open(path, wanted, wait_s, until))
        except RefusedError as error:
            if error.is_absent:
                self._absent[path] = str(error)
            raise
        return self._heads.setdefault(path, found)

    def names(self, folder: str) -> list[str] | None:
        """The files in a folder, or None if there is no way to know."""
        if self._names is not None:
            return self._names
        return self._persist(lambda wait_s, _: self._way().names(folder, wait_s))

    def text(self, path: str, *, most: int) -> bytes:
        """What a web server says at ``path``, which is no file.

        Raises:
            RefusedError: it does not, or it says more than ``most`` bytes.
        """
        way = self._way()
        assert isinstance(way, WebTransport), "buckets say nothing else"
        return self._persist(lambda wait_s, _: way.fetch(path, most=most, wait_s=wait_s))

    def hint(self, path: str, start: int, stop: int) -> None:
        """[start, stop) is read soon."""
        self._ahead.want(path, start, stop)

    def read(self, path: str, start: int, buffer: memoryview) -> int:
        """Fill the beginning of ``buffer``; returns how many bytes, at least one."""
        return self._ahead.read(path, start, buffer)

    def fetch(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with an open file's bytes from ``start`` on.

        Raises:
            ChangedError, TooLongError, RefusedError: they cannot be had.
        """
        pinned = self._heads[path]
        done = [0]
        stop = start + buffer.nbytes

        def attempt(wait_s: float, until: float) -> None:
            answer = self._way().ask(path, start + done[0], stop, wait_s)
            try:
                _check(answer.told, pinned, stop)
                self._fill(answer, buffer, done, wait_s, until)
            finally:
                answer.close()

        self._persist(attempt, done)

    def stop(self) -> None:
        """Have all that is under way fail now."""
        self._closing.set()
        self._ahead.stop()
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        """Stop, and wait until nothing is under way."""
        self.stop()
        self._ahead.join()

    def _way(self) -> Transport:
        with self._lock:
            if self._transport is None:
                self._transport = self._connect()
            return self._transport

    def _connect(self) -> Transport:
        if self.url.is_bucket:
            from streamload.sources.remote.bucket_transport import BucketTransport

            wait_s = self.timeout_s / _WAITS
            return BucketTransport(self.url, wait_s=wait_s, timeout_s=self.timeout_s)
        return WebTransport(self.url, self._token)

    def _open(self, path: str, wanted: int, wait_s: float, until: float) -> Head:
        answer = self._way().ask(path, 0, wanted, wait_s)
        try:
            told = answer.told
            if told.is_whole and told.total > _MOST_WHOLE_BYTES:
                raise RefusedError(
                    "the server does not send ranges of a file, only all of it: fetch it first, "
                    "and load it from there"
                )
            data = bytearray(told.stop - told.start)
            self._fill(answer, memoryview(data), [0], wait_s, until)
            return Head(told.total, told.version, bytes(data))
        finally:
            answer.close()

    def _fill(
        self, answer: Answer, buffer: memoryview, done: list[int], wait_s: float, until: float
    ) -> None:
        """Read on from ``done[0]``, which says how far it is also after an error."""
        before = done[0]
        try:
            while done[0] < buffer.nbytes:
                if self._closing.is_set() or time.monotonic() >= until:
                    raise BrokenError("it comes too slowly")
                block = buffer[done[0] : done[0] + _BLOCK_BYTES]
                count = answer.read_some(block, min(wait_s, max(until - time.monotonic(), 0.001)))
                if count == 0:
                    raise BrokenError(
                        f"the answer was cut off: expected {buffer.nbytes - before} bytes, found "
                        f"{done[0] - before}"
                    )
                done[0] += count
        finally:
            with self._lock:
                self.received_bytes += done[0] - before
                self.answers += 1

    def _persist(self, attempt: Callable[[float, float], _T], done: Sequence[int] = (0,)) -> _T:
        """What ``attempt(wait_s, until)`` returns, tried again as long as that is of use."""
        until = time.monotonic() + self.timeout_s
        reached, in_vain, tries = done[0], 0, 0
        while True:
            left_s = until - time.monotonic()
            try:
                return attempt(min(self.timeout_s / _WAITS, max(left_s, 0.001)), until)
            except BrokenError as error:
                problem = error
            tries += 1
            in_vain = 0 if done[0] > reached else in_vain + 1
            reached = done[0]
            pause_s = 0.0
            if in_vain:
                pause_s = min(_FIRST_PAUSE_S * 2 ** (in_vain - 1), _LONGEST_PAUSE_S)
                pause_s *= 0.5 + random.random() / 2
            pause_s = max(pause_s, problem.pause_s)
            if in_vain >= _MOST_IN_VAIN or time.monotonic() + pause_s >= until:
                raise TooLongError(
                    f"{problem}; gave up after {tries} attempts, the last {in_vain or 1} in vain "
                    f"(timeout_s={self.timeout_s:g})"
                ) from problem
            if self._closing.wait(pause_s):
                raise TooLongError("closed while it was read")


def _check(told: Told, pinned: Head, stop: int) -> None:
    """Refuse bytes of another version of the file, or others than were asked for."""
    if told.is_whole:
        raise RefusedError("the server has ceased to send ranges of the file")
    if (told.version, told.total) != (pinned.version, pinned.size):
        raise ChangedError(CHANGED)
    if told.stop != stop:
        raise RefusedError(f"the server sends bytes up to {told.stop}, expected {stop}")
