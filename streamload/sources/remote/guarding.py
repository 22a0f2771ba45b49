"""Which addresses may be contacted: a server must not lead a reader into the user's own network."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

from streamload.sources.remote.answers import BrokenError, RefusedError

# Prefixes under which an IPv6 address stands for an IPv4 one (RFC 6052, RFC 3056).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_6TO4 = ipaddress.ip_network("2002::/16")

Place = tuple[int, str]
"""A family of addresses and an address."""


def places_of(host: str, port: int, *, only_public: bool) -> list[Place]:
    """The addresses of a host, to be connected to as they are: a second look could differ.

    Raises:
        BrokenError: names cannot be looked up now.
        RefusedError: there is no such name; or, with ``only_public``, any of its addresses is not
            a public one.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        kind = BrokenError if getattr(error, "errno", 0) == socket.EAI_AGAIN else RefusedError
        raise kind("no host of that name was found") from error
    places: list[Place] = [(int(family), str(address[0])) for family, _, _, _, address in found]
    if only_public and not all(is_public(address) for _, address in places):
        raise RefusedError(
            "the server leads to a private address, which the given address does not name"
        )
    return places


def is_public(address: str) -> bool:
    """True for an address of the public internet, also where it stands in another one."""
    try:
        return all(_is_global(ip) for ip in _meanings(address.partition("%")[0]))
    except ValueError:
        return False


def _meanings(address: str) -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    ip = ipaddress.ip_address(address)
    yield (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            yield ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if ip in _6TO4:
            yield ipaddress.IPv4Address(int(ip) >> 80 & 0xFFFFFFFF)


def _is_global(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return ip.is_global and not ip.is_multicast and not ip.is_reserved
