"""Addresses of remote files: what may be printed of them, and what may not.

Everywhere else an address is its printable form, a plain string without user part and query; it
stands in messages, reports, extents and cache keys. The secrets stay with the ``Site``.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from dataclasses import dataclass, field, replace

from streamload.core.errors import CheckpointError
from streamload.core.wording import printable

_START = re.compile(r"(https?|s3|gs|az)://", re.IGNORECASE)
_BUCKETS = ("s3", "gs", "az")
_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".json")
# Of a path that is percent-encoded already; the rest (spaces, other scripts) is encoded.
_SAFE = "/%:@!$&'()*+,;=~-._"


def is_url(path: str) -> bool:
    """True for an address of a kind that is read in ranges."""
    return _START.match(path) is not None


@dataclass(frozen=True, slots=True)
class Url:
    """A parsed address.

    Attributes:
        scheme: ``https``, ``http``, ``s3``, ``gs`` or ``az``.
        host: of a web server, or the bucket (``az``: the container).
        port: as given, else None.
        path: percent-encoded for web servers, beginning with a slash; a bucket's key as it is.
        query, user: secrets, as given; only of web servers.
    """

    scheme: str
    host: str
    port: int | None
    path: str
    query: str = field(default="", repr=False)
    user: str = field(default="", repr=False)

    @property
    def is_bucket(self) -> bool:
        return self.scheme in _BUCKETS

    @property
    def origin(self) -> tuple[str, str, int | None]:
        return self.scheme, self.host, self.port

    def at(self, path: str) -> Url:
        """Another path on the same server, with the same secrets."""
        return replace(self, path=path)

    @property
    def shown(self) -> str:
        """The printable form: no query, no user part."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        slash = "/" if self.is_bucket and self.path else ""
        return f"{self.scheme}://{host}{port}{slash}{self.path}"

    @property
    def has_secrets(self) -> bool:
        return bool(self.query or self.user)


def parse_url(path: str) -> Url:
    """The address in a text.

    Raises:
        CheckpointError: it is malformed; the message holds no user part and no query.
    """
    scheme = path.partition(":")[0].lower()
    rest = path[len(scheme) + 3 :]
    if scheme in _BUCKETS:
        bucket, _, key = rest.partition("/")
        if "?" in rest or "@" in bucket:
            raise CheckpointError(
                "the address of a bucket has no query and no user part: credentials come from the "
                "environment",
                path=f"{scheme}://{bucket.rpartition('@')[2].partition('?')[0]}",
            )
        if not re.fullmatch(r"[\w.-]+", bucket):
            raise CheckpointError("names no bucket: expected scheme://BUCKET/PATH", path=path)
        return Url(scheme, bucket, None, key)
    try:
        parts = urllib.parse.urlsplit(path)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not host or re.search(r"[\s\\]", host):
        raise CheckpointError(
            "is no address of a file or folder on a web server", path=f"{scheme}://"
        )
    user = parts.netloc.rpartition("@")[0]
    return Url(scheme, host, port, _encoded(parts.path or "/"), parts.query, user)


def shown_path(path: str) -> str:
    """A path for messages: of an address the printable form, other paths as they are."""
    if not is_url(path):
        return path
    try:
        return parse_url(path).shown
    except CheckpointError as error:
        return str(error.path)


def is_file_address(path: str) -> bool:
    """True for the address of a file by its ending; without one it may be a folder."""
    return shown_path(path).lower().endswith(_FILES)


def join(folder: str, name: str) -> str:
    """The path of ``name``, relative with ``/``, in a local folder or one of an address."""
    if not is_url(folder):
        return os.path.join(folder, name)
    is_web = folder[:4].lower() == "http"
    return f"{folder.rstrip('/')}/{urllib.parse.quote(name) if is_web else name}"


def parent(path: str) -> str:
    """The folder of a file; of an address in its printable form."""
    if not is_url(path):
        return os.path.dirname(path)
    shown = shown_path(path)
    start, _, rest = shown.partition("://")
    return f"{start}://{rest.rpartition('/')[0]}" if "/" in rest else shown


def base_name(path: str) -> str:
    """The last part of a path, as a folder would list it."""
    if not is_url(path):
        return os.path.basename(path)
    name = shown_path(path).rstrip("/").rpartition("/")[2]
    return printable(urllib.parse.unquote(name) if path[:4].lower() == "http" else name)


def _encoded(path: str) -> str:
    stray = re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", path)
    return urllib.parse.quote(stray, safe=_SAFE, errors="surrogateescape")
