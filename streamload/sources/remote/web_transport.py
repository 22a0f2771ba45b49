"""Web servers, asked for ranges through the standard library's client.

Not through the buckets' library: that one follows redirects by itself, to wherever they lead. Here
each is looked at first, and a connection goes to the very address that was looked at.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
import urllib.parse
import weakref
from dataclasses import dataclass

from streamload import __version__
from streamload.sources.remote.answers import Answer, BrokenError, RefusedError, Told, Transport
from streamload.sources.remote.connections import (
    PORTS,
    Connection,
    authorization,
    broken,
    connect,
    connect_by_proxy,
    port_of,
    proxy_for,
)
from streamload.sources.remote.guarding import is_public, places_of
from streamload.sources.remote.urls import Url

_MOST_REDIRECTS = 5
_MOST_IDLE = 16
# A server closes connections that wait longer; a new one costs less than finding out.
_IDLE_S = 20.0
_SAFE = "/%:@!$&'()*+,;=~-._"
_ADDRESS = re.compile(r"[\d.]+|.*:.*")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAY_PASS = frozenset({408, 425, 429, 500, 502, 503, 504})
_ABSENT = frozenset({403, 404, 410})
# Of an address that a server led to, such as one that is signed for some time.
_OUTDATED = frozenset({400, 401, 403, 404, 410})
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_NO_RANGE = re.compile(r"bytes \*/(\d{1,19})")


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a request goes; ``is_own``: to the host that the user named."""

    url: Url
    is_own: bool


class WebTransport(Transport):
    """Connections to one server, and to those it leads to.

    Args:
        url: an address on the server, with the user's secrets.
        token: sent as a bearer token, to this server alone.
    """

    def __init__(self, url: Url, token: str = "") -> None:
        self._url = url
        self._secret = authorization(url, token)
        self._idle: list[tuple[float, Connection]] = []
        self._moved: dict[str, _Target] = {}
        self._own_is_public: bool | None = None
        self._live: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._lock = threading.RLock()  # a collection may close it while it is used

    def ask(self, path: str, start: int, stop: int, wait_s: float) -> Answer:
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        answer = self._request(path, headers, wait_s)
        try:
            return WebAnswer(self, *answer, _told(answer[1], start, stop))
        except BaseException:
            answer[0].end()
            raise

    def names(self, folder: str, wait_s: float) -> list[str] | None:
        del folder, wait_s
        return None

    def fetch(self, path: str, *, most: int, wait_s: float) -> bytes:
        """All of a small answer that is no file, such as what an API says.

        Raises:
            BrokenError, RefusedError: see ``ask``; or it has more than ``most`` bytes.
        """
        connection, response = self._request(path, {}, wait_s)
        try:
            if response.status != http.client.OK:
                raise RefusedError(f"the server answers {response.status}")
            data = response.read(most + 1)
        except (OSError, http.client.HTTPException) as error:
            raise BrokenError("the connection broke") from error
        finally:
            connection.end()
        if len(data) > most:
            raise RefusedError(f"the answer has more than {most} bytes")
        return data

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            live = list(self._live)
        for _, connection in idle:
            connection.end()
        for connection in live:
            connection.cut()

    def _request(
        self, path: str, headers: dict[str, str], wait_s: float
    ) -> tuple[Connection, http.client.HTTPResponse]:
        """The answer that is no redirect, from wherever the server leads to."""
        own = _Target(Url(*self._url.origin, path, self._url.query), is_own=True)
        target = self._moved.get(path, own)
        for _ in range(_MOST_REDIRECTS + 1):
            connection, response = self._send(target, headers, wait_s)
            if response.status in (200, 206, 416):
                if target is not own:
                    self._moved[path] = target
                return connection, response
            connection.end()
            if response.status in _REDIRECTS:
                target = self._next(target, response.headers.get("Location", ""))
            elif response.status in _OUTDATED and self._moved.pop(path, None) is not None:
                target = own
            else:
                raise _failure(response)
        raise RefusedError(f"the server redirects more than {_MOST_REDIRECTS} times")

    def _next(self, target: _Target, location: str) -> _Target:
        """Where a redirect leads, without anything that is secret."""
        url = _led_to(target.url, location)
        return _Target(url, is_own=url.host == self._url.host)

    def _send(
        self, target: _Target, headers: dict[str, str], wait_s: float
    ) -> tuple[Connection, http.client.HTTPResponse]:
        url = target.url
        # A compressed answer has no ranges of the file.
        sent = {"User-Agent": f"streamload/{__version__}", "Accept-Encoding": "identity", **headers}
        if self._secret and url.origin == self._url.origin:
            sent["Authorization"] = self._secret
        while True:
            connection, is_used = self._connection(target, wait_s)
            try:
                connection.wait(wait_s)
                path = f"{url.path}?{url.query}" if url.query else url.path
                connection.request("GET", connection.target_of(path), headers=sent)
                return connection, connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                connection.end()
                if is_used and not isinstance(error, TimeoutError):
                    continue  # the server had closed it meanwhile
                raise broken(error) from error

    def _connection(self, target: _Target, wait_s: float) -> tuple[Connection, bool]:
        """A connection that waits, else a new one."""
        origin = target.url.origin
        with self._lock:
            late = time.monotonic() - _IDLE_S
            for at in range(len(self._idle) - 1, -1, -1):
                since, connection = self._idle[at]
                if since < late:
                    self._idle.pop(at)[1].end()
                elif connection.origin == origin:
                    del self._idle[at]
                    return connection, True
        connection = self._connect(target, wait_s)
        with self._lock:
            self._live.add(connection)
        return connection, False

    def _connect(self, target: _Target, wait_s: float) -> Connection:
        url = target.url
        proxy = proxy_for(url)
        if proxy is not None:
            # Names are then the proxy's to look up; what is an address is seen here too.
            if not target.is_own and _ADDRESS.fullmatch(url.host):
                places_of(url.host, port_of(url), only_public=True)
            return connect_by_proxy(url, proxy, wait_s)
        must = not target.is_own or self._own_is_public is True
        places = places_of(url.host, port_of(url), only_public=must)
        if target.is_own and self._own_is_public is None:
            self._own_is_public = all(is_public(address) for _, address in places)
        return connect(url, places, wait_s)

    def take_back(self, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end."""
        with self._lock:
            self._idle.append((time.monotonic(), connection))
            old = self._idle.pop(0)[1] if len(self._idle) > _MOST_IDLE else None
        if old is not None:
            old.end()


class WebAnswer(Answer):
    """The body of an answer; its connection goes back once all of it was read."""

    def __init__(
        self,
        transport: WebTransport,
        connection: Connection,
        response: http.client.HTTPResponse,
        told: Told,
    ) -> None:
        self.told = told
        self._transport = transport
        self._connection = connection
        self._response = response

    def read_some(self, buffer: memoryview, wait_s: float) -> int:
        try:
            self._connection.wait(wait_s)
            return self._read_once(buffer)
        except (OSError, http.client.HTTPException) as error:
            raise broken(error) from error

    def _read_once(self, buffer: memoryview) -> int:
        """What arrives at once: ``readinto`` would wait for all, however slowly it comes."""
        answer = self._response
        if answer.chunked or answer.length is None:
            data = answer.read1(buffer.nbytes)
            buffer[: len(data)] = data
            return len(data)
        if not answer.length:
            return 0
        count = answer.fp.readinto1(buffer[: answer.length])
        answer.length -= count
        if not answer.length:
            answer.read()  # it ends here, and the connection may be used again
        return count

    def close(self) -> None:
        if self._response.isclosed() and not self._response.will_close:
            self._transport.take_back(self._connection)
        else:
            self._connection.end()


def _led_to(old: Url, location: str) -> Url:
    """The address that a redirect names.

    Raises:
        RefusedError: it is none, or one that is less safe.
    """
    try:
        parts = urllib.parse.urlsplit(urllib.parse.urljoin(old.shown, location))
        host, port = parts.hostname or "", parts.port
    except ValueError:
        location = ""
    if not location or parts.scheme not in PORTS or not host:
        raise RefusedError("the server redirects to what is no address of a web server")
    if parts.scheme == "http" and old.scheme == "https":
        raise RefusedError("the server redirects from https to http")
    path = urllib.parse.quote(parts.path or "/", safe=_SAFE)
    return Url(parts.scheme, host, port, path, urllib.parse.quote(parts.query, safe=_SAFE + "?"))


def _told(response: http.client.HTTPResponse, start: int, stop: int) -> Told:
    """What an answer says, if it can be what was asked for.

    Raises:
        RefusedError: it is another part, or says things that contradict each other.
    """
    headers = response.headers
    version = headers.get("ETag") or headers.get("Last-Modified") or ""
    length = headers.get("Content-Length", "")
    if headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RefusedError("the server sends the file compressed, which was not asked for")
    said = headers.get("Content-Range", "")
    if response.status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
        found = _NO_RANGE.fullmatch(said)
        if found is None and start:
            raise RefusedError("the server answers 416: it has no such range of bytes")
        return Told(start, start, int(found[1]) if found else 0, version)
    if response.status == http.client.OK:
        if not length.isdigit():
            raise RefusedError("the server sends neither ranges nor the file's length")
        return Told(0, int(length), int(length), version, is_whole=True)
    found = _RANGE.fullmatch(said)
    if found is None:
        raise RefusedError(f"the server sends a range and says it is {said[:60]!r}")
    first, last, total = int(found[1]), int(found[2]), int(found[3])
    if first != start or last >= total or last + 1 != min(stop, total):
        raise RefusedError(f"asked for bytes {start}-{stop - 1}, the server sends {said[:60]!r}")
    if length and length != str(last + 1 - first):
        raise RefusedError(
            f"the server announces {length[:30]} bytes for a range of {last + 1 - first}"
        )
    return Told(first, last + 1, total, version)


def _failure(response: http.client.HTTPResponse) -> BrokenError | RefusedError:
    status, said = response.status, response.headers.get("Retry-After", "")
    text = f"the server answers {status} {http.client.responses.get(status, '')}".rstrip()
    if status in _MAY_PASS:
        return BrokenError(text, float(said) if said.isdigit() and len(said) < 6 else 0.0)
    return RefusedError(text, is_absent=status in _ABSENT)
