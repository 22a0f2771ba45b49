"""One file on a server, with the face of an open file: read in ranges, one version throughout."""

from __future__ import annotations

import errno

from streamload.core.errors import CheckpointError, CheckpointNotFoundError, ReadError
from streamload.sources.files import ReadableFile
from streamload.sources.remote.answers import RefusedError
from streamload.sources.remote.registry import find_site, leave_site
from streamload.sources.remote.sites import ChangedError, Site, TooLongError
from streamload.sources.remote.urls import parse_url

_NUMBERS = {ChangedError: errno.ESTALE, TooLongError: errno.ETIMEDOUT}


class RemoteFile(ReadableFile):
    """A file at an address; ``path`` is that without what is secret.

    Every range that is read is of the version that was there when it was opened.

    Raises:
        CheckpointNotFoundError: the server has no such file, or none for us.
        CheckpointError: it cannot be read, or not in ranges.
    """

    is_remote = True
    _site: Site | None = None

    def __init__(self, path: str) -> None:
        url = parse_url(path)
        self.path = url.shown
        self._at = url.path
        site = find_site(url)
        try:
            self._head = site.head(url.path)
        except RefusedError as error:
            leave_site(site)
            kind = CheckpointNotFoundError if error.is_absent else CheckpointError
            raise kind(str(error), path=self.path) from error
        except BaseException:
            leave_site(site)
            raise
        self._site = site
        self.size_bytes = self._head.size

    @property
    def identity(self) -> tuple[object, ...]:
        """What is another for another file or another content of it.

        Raises:
            CheckpointError: the server says nothing that would be.
        """
        if not self._head.version:
            raise CheckpointError(
                "the server sends neither an ETag nor a date, so that a change would not show",
                path=self.path,
            )
        return "remote", self.path, self._head.version, self._head.size

    def read_into(self, offset: int, buffer: memoryview, *, tensor: str | None = None) -> None:
        total = buffer.nbytes
        there = max(min(total, self.size_bytes - offset), 0)
        if there < total:
            raise ReadError(
                f"the file ended early: expected {total} bytes from byte {offset}, found {there}",
                path=self.path,
                tensor=tensor,
                errno=errno.EIO,
            )
        start = self._head.data[offset : offset + total]
        buffer[: len(start)] = start
        try:
            self._read_rest(offset, buffer, len(start))
        except RefusedError as error:
            number = _NUMBERS.get(type(error), errno.EIO)
            raise ReadError(str(error), path=self.path, tensor=tensor, errno=number) from error

    def _read_rest(self, offset: int, buffer: memoryview, done: int) -> None:
        site = self._site
        if site is None:
            raise RefusedError("the file was closed")
        while done < buffer.nbytes:
            done += site.read(self._at, offset + done, buffer[done:])

    def advise(self, offset: int, nbytes: int, *, needed: bool) -> None:
        start = max(offset, len(self._head.data))
        stop = min(offset + nbytes, self.size_bytes)
        if needed and self._site is not None and start < stop:
            self._site.hint(self._at, start, stop)

    def check_unchanged(self) -> None:
        """All that was read is of one version: each answer has said so."""

    def reason_to_read(self, kinds: dict[int, str]) -> str:
        del kinds
        return f"{self.path} is read over the network"

    @property
    def site(self) -> Site | None:
        """Its server, until it is closed."""
        return self._site

    def interrupt(self) -> None:
        if self._site is not None:
            self._site.stop()

    def close(self) -> None:
        site, self._site = self._site, None
        if site is not None:
            leave_site(site)

    def __del__(self) -> None:
        site, self._site = self._site, None
        if site is not None:
            leave_site(site, wait=False)  # a collection may run in one of its own threads
