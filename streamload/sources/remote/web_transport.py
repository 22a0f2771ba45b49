"""Web servers, asked for ranges through the standard library's client.

Not through the buckets' library: that one follows redirects by itself, to wherever they lead. Here
each is looked at first, and a connection goes to the very address that was looked at.
"""

from __future__ import annotations

import base64
import http.client
import re
import socket
import threading
import time
import urllib.parse
import urllib.request
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from streamload import __version__
from streamload.sources.remote.answers import Answer, BrokenError, RefusedError, Told, Transport
from streamload.sources.remote.guarding import Place, is_public, places_of
from streamload.sources.remote.urls import Url, parse_url

_MOST_REDIRECTS = 5
_MOST_IDLE = 16
# A server closes connections that wait longer; a new one costs less than finding out.
_IDLE_S = 20.0
_PORTS = {"http": 80, "https": 443}
_HERE = ("localhost", "127.0.0.1", "::1")
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
        self._secret = _authorization(url, token)
        self._idle: list[tuple[float, _Connection]] = []
        self._moved: dict[str, _Target] = {}
        self._own_is_public: bool | None = None
        self._live: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self._lock = threading.Lock()

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
    ) -> tuple[_Connection, http.client.HTTPResponse]:
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
        try:
            old = target.url
            parts = urllib.parse.urlsplit(urllib.parse.urljoin(old.shown, location))
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        if not location or parts.scheme not in _PORTS or not host:
            raise RefusedError("the server redirects to what is no address of a web server")
        if parts.scheme == "http" and old.scheme == "https":
            raise RefusedError("the server redirects from https to http")
        path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
        url = Url(parts.scheme, host, port, path, query)
        return _Target(url, is_own=host == self._url.host)

    def _send(
        self, target: _Target, headers: dict[str, str], wait_s: float
    ) -> tuple[_Connection, http.client.HTTPResponse]:
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
                raise _broken(error) from error

    def _connection(self, target: _Target, wait_s: float) -> tuple[_Connection, bool]:
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

    def _connect(self, target: _Target, wait_s: float) -> _Connection:
        url = target.url
        port = url.port or _PORTS[url.scheme]
        proxy = _proxy_for(url)
        if proxy is not None:
            # Names are then the proxy's to look up; what is an address is seen here too.
            if not target.is_own and re.fullmatch(r"[\d.]+|.*:.*", url.host):
                places_of(url.host, port, only_public=True)
            return _connected(url, port, [], proxy, wait_s)
        must = not target.is_own or self._own_is_public is True
        places = places_of(url.host, port, only_public=must)
        if target.is_own and self._own_is_public is None:
            self._own_is_public = all(is_public(address) for _, address in places)
        return _connected(url, port, places, None, wait_s)

    def take_back(self, connection: _Connection) -> None:
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
        connection: _Connection,
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
            data = self._response.read1(buffer.nbytes)
        except (OSError, http.client.HTTPException) as error:
            raise _broken(error) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if self._response.isclosed() and not self._response.will_close:
            self._transport.take_back(self._connection)
        else:
            self._connection.end()


class _Connection(http.client.HTTPConnection):
    """A connection that is made already, to an address that was looked at."""

    def __init__(self, url: Url, port: int, sock: socket.socket, *, by_proxy: bool) -> None:
        super().__init__(url.host, port)
        self.origin = url.origin
        self.sock = sock
        self.auto_open = 0
        self._start = ""
        if by_proxy and url.scheme == "http":
            self._start = Url(*url.origin, "").shown
        self._socket = sock
        self._response: http.client.HTTPResponse | None = None
        # As a user would write it; http.client would leave the port of the other scheme in.
        self.default_port = _PORTS[url.scheme]

    def target_of(self, path: str) -> str:
        return self._start + path

    def wait(self, wait_s: float) -> None:
        """From now on each wait for the server is at most so long."""
        self._socket.settimeout(max(wait_s, 0.001))

    def getresponse(self) -> http.client.HTTPResponse:
        self._response = super().getresponse()
        return self._response

    def cut(self) -> None:
        """Have another thread's waiting for the server end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Close it, whatever is still to be read."""
        self.close()
        if self._response is not None:
            self._response.close()
        self._socket.close()


def _connected(
    url: Url, port: int, places: list[Place], proxy: Url | None, wait_s: float
) -> _Connection:
    """A connection to one of the places, the first that answers, or through a proxy."""
    if proxy is not None:
        proxy_port = proxy.port or _PORTS.get(proxy.scheme, 80)
        places = places_of(proxy.host, proxy_port, only_public=False)
        is_tunnel = url.scheme == "https"
    problem: OSError | None = None
    for family, address in places:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(wait_s)
            sock.connect((address, port if proxy is None else proxy_port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if proxy is not None and is_tunnel:
                _tunnel(sock, url, port, proxy)
            if url.scheme == "https":
                import ssl  # 30 ms that plain HTTP does without

                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=url.host)
            return _Connection(url, port, sock, by_proxy=proxy is not None)
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
    assert problem is not None, "a name that is found has an address"
    raise _broken(problem) from problem


def _tunnel(sock: socket.socket, url: Url, port: int, proxy: Url) -> None:
    """Have a proxy pass on what follows."""
    host = f"[{url.host}]" if ":" in url.host else url.host
    secret = _authorization(proxy, "")
    more = f"Proxy-Authorization: {secret}\r\n" if secret else ""
    sock.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n{more}\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n") and len(head) < 65536:
        byte = sock.recv(1)
        if not byte:
            break
        head += byte
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        raise ConnectionError("the proxy refuses")


def _proxy_for(url: Url) -> Url | None:
    """The proxy that the environment names for an address, by the usual variables."""
    given = urllib.request.getproxies().get(url.scheme)
    if not given or url.host in _HERE or urllib.request.proxy_bypass(url.host):
        return None
    return parse_url(given if "://" in given else f"http://{given}")


def _authorization(url: Url, token: str) -> str:
    if token:
        return f"Bearer {token}"
    if not url.user:
        return ""
    return f"Basic {base64.b64encode(urllib.parse.unquote(url.user).encode()).decode()}"


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


def _broken(error: Any) -> BrokenError | RefusedError:
    """In words that hold nothing of the address."""
    if isinstance(error, TimeoutError):
        return BrokenError("nothing came from the server")
    name = type(error).__name__
    if name == "SSLCertVerificationError":
        return RefusedError(f"the certificate is not trusted: {error.verify_message}")
    if isinstance(error, ConnectionRefusedError):
        return BrokenError("no connection: it was refused")
    reason = getattr(error, "strerror", None) if isinstance(error, OSError) else None
    return BrokenError(f"the connection broke ({reason or name})")
