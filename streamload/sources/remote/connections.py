"""Connections to web servers: to the very addresses that were looked at, or through a proxy."""

from __future__ import annotations

import base64
import http.client
import socket
import urllib.parse
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from streamload.sources.remote.answers import BrokenError, RefusedError
from streamload.sources.remote.guarding import Place, places_of
from streamload.sources.remote.urls import Url, parse_url

PORTS = {"http": 80, "https": 443}
_HERE = ("localhost", "127.0.0.1", "::1")


class Connection(http.client.HTTPConnection):
    """A connection that is made already, to an address that was looked at."""

    def __init__(self, url: Url, sock: socket.socket, *, by_proxy: bool) -> None:
        super().__init__(url.host, port_of(url))
        self.origin = url.origin
        self.sock = sock
        self.auto_open = 0
        self._start = ""
        if by_proxy and url.scheme == "http":
            self._start = Url(*url.origin, "").shown
        self._socket = sock
        self._response: http.client.HTTPResponse | None = None
        # As a user would write it; http.client would leave the port of the other scheme in.
        self.default_port = PORTS[url.scheme]

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


def connect(url: Url, places: Sequence[Place], wait_s: float) -> Connection:
    """A connection to one of the places of a server, the first that answers.

    Raises:
        BrokenError, RefusedError: there is none.
    """
    return _first(url, places, port_of(url), wait_s, None)


def connect_by_proxy(url: Url, proxy: Url, wait_s: float) -> Connection:
    """As ``connect``, through a proxy of the user's."""
    port = port_of(proxy)
    return _first(url, places_of(proxy.host, port, only_public=False), port, wait_s, proxy)


def _first(
    url: Url, places: Sequence[Place], port: int, wait_s: float, proxy: Url | None
) -> Connection:
    problem: OSError | None = None
    for family, address in places:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(wait_s)
            sock.connect((address, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if proxy is not None and url.scheme == "https":
                _tunnel(sock, url, proxy)
            if url.scheme == "https":
                import ssl  # 30 ms that plain HTTP does without

                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=url.host)
            return Connection(url, sock, by_proxy=proxy is not None)
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
    assert problem is not None, "a name that is found has an address"
    raise broken(problem) from problem


def _tunnel(sock: socket.socket, url: Url, proxy: Url) -> None:
    """Have a proxy pass on what follows."""
    port = port_of(url)
    host = f"[{url.host}]" if ":" in url.host else url.host
    secret = authorization(proxy, "")
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


def proxy_for(url: Url) -> Url | None:
    """The proxy that the environment names for an address, by the usual variables."""
    given = urllib.request.getproxies().get(url.scheme)
    if not given or url.host in _HERE or urllib.request.proxy_bypass(url.host):
        return None
    return parse_url(given if "://" in given else f"http://{given}")


def port_of(url: Url) -> int:
    return url.port or PORTS.get(url.scheme, 80)


def authorization(url: Url, token: str) -> str:
    if token:
        return f"Bearer {token}"
    if not url.user:
        return ""
    return f"Basic {base64.b64encode(urllib.parse.unquote(url.user).encode()).decode()}"


def broken(error: Any) -> BrokenError | RefusedError:
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
