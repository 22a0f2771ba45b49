"""One file over HTTP: resumed where it broke off, and under its own name only when it is whole.

What arrives goes into ``NAME.part``; ``NAME.part.json`` beside it says of which version of the
file it is the beginning, so that two versions are never put together. Only one process at a time
goes on with a part, and none with what is not this user's own.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from streamload import __version__
from streamload.core.errors import CheckpointError, DownloadError, ReadError, WriteError
from streamload.saving.atomic import StagedFile, committing, translated
from streamload.saving.locks import is_at, open_own
from streamload.saving.workplace import mode_of_old
from streamload.sources.small_files import read_object

Progress = Callable[[int, int, str], object]
_BLOCK_BYTES = 1 << 20
_MOST_TRIES = 100
_LONGEST_PAUSE_S = 30.0
_MAY_PASS = frozenset({408, 425, 429, 500, 502, 503, 504})
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of one file; ``received_bytes`` came over the network now."""

    received_bytes: int = 0
    was_there: bool = False
    resumed: bool = False


class _BrokenError(Exception):
    """An attempt failed, but another one may succeed."""


@dataclass
class _Known:
    """What is known of the file a part is the beginning of; -1 and "" where nothing is."""

    total: int = -1
    validator: str = ""


def fetch(
    url: str,
    path: str,
    *,
    attempts: int = 5,
    pause_s: float = 1.0,
    timeout_s: float = 30.0,
    progress: Progress | None = None,
) -> Fetched:
    """Fetch one file, unless it is there already with the length that the server announces.

    Args:
        url: http or https.
        path: where the file goes; its folder is made.
        attempts: give up after this many attempts in a row that bring nothing new.
        pause_s: before the second of these attempts; doubled before each further one.
        timeout_s: for connecting and for each wait for data.
        progress: called as progress(done_bytes, total_bytes, file name); 0 if the total is not
            known.

    Raises:
        DownloadError: the server refuses, breaks off again and again, or sends something else
            than it announces. What arrived is kept for the next call.
        WriteError: the disk is full, or the path cannot be written.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise DownloadError("expected an address that begins with http:// or https://", path=url)
    if os.path.isfile(path) and _announced(url, timeout_s) in (-1, os.path.getsize(path)):
        return Fetched(was_there=True)
    with translated(path):
        os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
    part = _Part(url, path, timeout_s, progress)
    with part.locked():
        resumed = part.size > 0
        _try_until_whole(part, attempts, pause_s)
        part.finish()
    return Fetched(part.received, resumed=resumed)


def _try_until_whole(part: _Part, attempts: int, pause_s: float) -> None:
    best, in_vain = part.size, 0
    for _ in range(_MOST_TRIES):
        try:
            part.extend()
            return
        except _BrokenError as error:
            in_vain = 0 if part.size > best else in_vain + 1
            best = max(best, part.size)
            problem = error
        if in_vain >= attempts:
            break
        time.sleep(min(pause_s * 2 ** max(in_vain - 1, 0), _LONGEST_PAUSE_S))
    raise DownloadError(
        f"{problem}; {part.size} bytes are kept; the next attempt resumes from there",
        path=part.url,
    ) from problem


def _announced(url: str, timeout_s: float) -> int:
    """The length the server tells; -1 if it does not, or cannot be asked."""
    try:
        with _open(url, {}, timeout_s, method="HEAD") as answer:
            return _whole_number(answer.headers.get("Content-Length"))
    except (OSError, http.client.HTTPException):
        return -1


def _open(url: str, headers: dict[str, str], timeout_s: float, *, method: str = "GET") -> Any:
    # A compressed answer could neither be resumed nor measured.
    fixed = {"User-Agent": f"streamload/{__version__}", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers={**fixed, **headers}, method=method)
    return urllib.request.urlopen(request, timeout=timeout_s)


class _Part:
    """The beginning of one file on disk."""

    def __init__(self, url: str, path: str, timeout_s: float, progress: Progress | None) -> None:
        self.url = url
        self.path = path
        self.received = 0
        self._part = path + ".part"
        self._note = path + ".part.json"
        self._timeout_s = timeout_s
        self._progress = progress
        self._known = _Known()
        self._descriptor = -1

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Open the part, for this process alone.

        Raises:
            DownloadError: another process is fetching the file.
        """
        with translated(self.path):
            descriptor = open_own(self._part)
        if descriptor is None:
            raise DownloadError("another process is fetching this file", path=self.path)
        self._descriptor = descriptor
        try:
            self._known = self._read_note()
            yield
        finally:
            os.close(descriptor)

    @property
    def size(self) -> int:
        """Bytes that are there."""
        return os.fstat(self._descriptor).st_size

    def extend(self) -> None:
        """Try once to fetch what is not there yet.

        Raises:
            _BrokenError: another attempt may succeed.
            DownloadError: it would not.
        """
        start = self.size
        headers = {"Range": f"bytes={start}-"} if start else {}
        if start and self._known.validator:
            headers["If-Range"] = self._known.validator
        try:
            with _open(self.url, headers, self._timeout_s) as answer:
                self._take(answer, start)
        except urllib.error.HTTPError as error:
            self._refused(error, start)
        except urllib.error.URLError as error:
            raise _BrokenError(f"no connection: {error.reason}") from error
        except (DownloadError, WriteError):
            raise
        except (http.client.HTTPException, OSError) as error:
            raise _BrokenError(f"the connection broke: {error or type(error).__name__}") from error

    def _refused(self, error: urllib.error.HTTPError, start: int) -> None:
        with error:
            status, reason = error.code, error.reason
            total = _whole_number((error.headers.get("Content-Range") or "").rpartition("/")[2])
        if status == _RANGE_NOT_SATISFIABLE and start:
            if total == start and self._known.total in (-1, total):
                return  # all of it was there already
            self._restart()
            raise _BrokenError(
                f"the server has {total} bytes, {start} were here already: started over"
            )
        text = f"the server answers {status} {reason}"
        if status in _MAY_PASS:
            raise _BrokenError(text)
        raise DownloadError(f"{text}; nothing was fetched", path=self.url) from error

    def _take(self, answer: Any, start: int) -> None:
        """Write the answer's body behind what is there."""
        headers = answer.headers
        if headers.get("Content-Encoding", "identity") != "identity":
            raise DownloadError(
                "the server sends the file compressed, which was not asked for", path=self.url
            )
        kind = headers.get_content_type()
        if kind == "text/html" and not self.path.endswith((".html", ".htm")):
            raise DownloadError("the server sends a web page, not the file", path=self.url)
        length = _whole_number(headers.get("Content-Length"))
        now = _Known(length, _validator(headers))
        if answer.status == http.HTTPStatus.PARTIAL_CONTENT:
            begin, total = _range(headers.get("Content-Range", ""))
            now.total = total
            if begin != start or self._is_other(now):
                self._restart()
                raise _BrokenError("the file has changed on the server: started over")
        elif start:
            self._restart()  # the server cannot go on in the middle
        self._write_note(now)
        self._copy(answer, now.total)
        if now.total >= 0 and self.size != now.total:
            size = self.size
            if size > now.total:
                self._restart()
            raise _BrokenError(f"the server announced {now.total} bytes and sent {size}")

    def _is_other(self, now: _Known) -> bool:
        known = self._known
        return (-1 not in (now.total, known.total) and now.total != known.total) or bool(
            now.validator and known.validator and now.validator != known.validator
        )

    def _copy(self, answer: Any, total: int) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_END)
        done = self.size
        while block := answer.read(_BLOCK_BYTES):
            with translated(self.path):
                view = memoryview(block)
                while view.nbytes:
                    view = view[os.write(self._descriptor, view) :]
            done += len(block)
            self.received += len(block)
            if self._progress is not None:
                self._progress(done, max(total, 0), os.path.basename(self.path))

    def _restart(self) -> None:
        with translated(self.path):
            os.ftruncate(self._descriptor, 0)
        self._known = _Known()

    def _read_note(self) -> _Known:
        if not self.size:
            return _Known()
        try:
            note = read_object(self._note)
        except (CheckpointError, ReadError):
            return _Known()
        total, validator = note.get("total"), note.get("validator")
        if type(total) is not int or type(validator) is not str:
            return _Known()
        return _Known(total, validator)

    def _write_note(self, known: _Known) -> None:
        self._known = known
        text = json.dumps({"total": known.total, "validator": known.validator})
        with committing(StagedFile(self._note, durable=False)) as file:
            file.write(text.encode(), 0)

    def finish(self) -> None:
        """Give the whole file its name.

        Raises:
            DownloadError: another process, which no lock keeps away, meddled with the part.
        """
        if self.received and self._read_note() != self._known:
            self._restart()
            raise DownloadError("another process is fetching another version", path=self.path)
        with translated(self.path):
            os.fsync(self._descriptor)
            with suppress(OSError):
                file = self._descriptor if os.chmod in os.supports_fd else self._part
                os.chmod(file, mode_of_old(self.path, os.fstat(self._descriptor)))
            # First, as the next process may begin a part of its own as soon as this one is gone.
            with suppress(OSError):
                os.unlink(self._note)
            os.replace(self._part, self.path)
        if not is_at(self.path, self._descriptor):
            raise DownloadError("another file was put in its place meanwhile", path=self.path)


def _validator(headers: Any) -> str:
    """What tells versions apart (RFC 9110, 13.1.5): a strong ETag, else the last change."""
    tag: str = headers.get("ETag", "")
    if tag and not tag.startswith("W/"):
        return tag
    return str(headers.get("Last-Modified", ""))


def _range(text: str) -> tuple[int, int]:
    """First byte and total of ``bytes 5-9/10``; -1 where it does not say."""
    span, _, total = text.removeprefix("bytes ").partition("/")
    return _whole_number(span.partition("-")[0]), _whole_number(total)


def _whole_number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.strip().isdigit() else -1
