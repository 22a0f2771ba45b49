"""What servers answer, whatever their kind: a run of bytes, or why there is none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


class BrokenError(Exception):
    """An attempt failed, but another one may succeed.

    Attributes:
        pause_s: how long the server asks to be left alone; 0.0 if it does not say.
    """

    def __init__(self, text: str, pause_s: float = 0.0) -> None:
        super().__init__(text)
        self.pause_s = pause_s


class RefusedError(Exception):
    """There is no point in trying again.

    Attributes:
        is_absent: there is no such file, or none for us: the two are often told alike.
    """

    def __init__(self, text: str, *, is_absent: bool = False) -> None:
        super().__init__(text)
        self.is_absent = is_absent


@dataclass(frozen=True, slots=True)
class Told:
    """What an answer's head says.

    Attributes:
        start, stop: which bytes of the file it brings.
        total: the file's length.
        version: what is another for another content (ETag, else the date); "" if nothing is.
        is_whole: all of the file came, though a part was asked for.
    """

    start: int
    stop: int
    total: int
    version: str
    is_whole: bool = False


class Answer(ABC):
    """An answer whose bytes are still to be read."""

    told: Told

    @abstractmethod
    def read_some(self, buffer: memoryview, wait_s: float) -> int:
        """Fill a part of ``buffer`` with what arrives; 0 at the end.

        Raises:
            BrokenError: the connection broke, or nothing came for ``wait_s`` seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the rest, if there is any."""


class Transport(ABC):
    """A way to one server."""

    @abstractmethod
    def ask(self, path: str, start: int, stop: int, wait_s: float) -> Answer:
        """Ask for the bytes [start, stop) of the file at ``path`` (``Url.path``). Thread safe.

        Raises:
            BrokenError, RefusedError: there is no answer to be read.
        """

    @abstractmethod
    def names(self, folder: str, wait_s: float) -> list[str] | None:
        """The files in a folder (``Url.path``) and below; None if servers of the kind tell none."""

    def close(self) -> None:  # noqa: B027  # not all hold connections
        """Close all connections."""
