"""Buckets (S3, Google Cloud Storage, Azure), through obstore (extra ``remote``).

Credentials, region and endpoint are found as that library finds them: in the environment
(``AWS_*``, ``GOOGLE_*``, ``AZURE_*``), else from the machine's own metadata service.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from streamload.core.errors import MissingExtraError
from streamload.sources.remote.answers import Answer, BrokenError, RefusedError, Told, Transport
from streamload.sources.remote.urls import Url

_T = TypeVar("_T")
_STORES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_VARIABLES = {"s3": "AWS_*", "gs": "GOOGLE_*", "az": "AZURE_*"}
_STREAMED_BYTES = 512 << 10
_LISTED = 1000
_MAY_PASS = frozenset({408, 425, 429, 500, 502, 503, 504})
_STATUS = re.compile(r"status code: (\d{3})")
# Where that library asks for credentials if it was given none.
_METADATA = re.compile(
    r"169\.254\.\d|/latest/|[mM]etadata|token request|MissingAccount|must be specified"
)


class BucketTransport(Transport):
    """One bucket.

    Raises:
        MissingExtraError: obstore is not installed.
        RefusedError: the environment's settings contradict each other, or lack an account.
    """

    def __init__(self, url: Url, *, wait_s: float, timeout_s: float) -> None:
        try:
            import obstore
            from obstore import store
        except ImportError as error:
            raise MissingExtraError(
                "obstore", extra="remote", purpose=f"reading {url.scheme}:// addresses"
            ) from error
        self._scheme = url.scheme
        self._library: Any = obstore
        # Not as client_options, which would do away with those of the environment.
        waits = {
            "timeout": _in_ms(timeout_s),
            "connect_timeout": _in_ms(wait_s),
            "read_timeout": _in_ms(wait_s),
        }
        # Trying again is ours to do: with a bound, and with the version compared.
        once = {"max_retries": 0, "retry_timeout": timedelta(seconds=wait_s)}
        self._store: Any = self._translated(
            lambda: getattr(store, _STORES[url.scheme])(url.host, config=waits, retry_config=once)
        )

    def ask(self, path: str, start: int, stop: int, wait_s: float) -> Answer:
        del wait_s
        options = {"range": (start, stop)}
        try:
            result = self._translated(lambda: self._library.get(self._store, path, options=options))
        except _NoRangeError:
            return _Nothing()
        meta = result.meta
        date = meta["last_modified"]
        version = meta["e_tag"] or (date.isoformat() if date is not None else "")
        first, end = result.range
        told = Told(first, end, meta["size"], str(version))
        if told.start != start or told.stop != min(stop, told.total):
            raise RefusedError(
                f"asked for bytes {start}-{stop - 1}, the server sends {told.start}-{told.stop - 1}"
            )
        return _BucketAnswer(self, result, told)

    def names(self, folder: str, wait_s: float) -> list[str]:
        del wait_s
        start = folder.strip("/")
        found = self._translated(
            lambda: self._library.list_with_delimiter(self._store, start or None)
        )
        skip = len(start) + 1 if start else 0
        return sorted(entry["path"][skip:] for entry in found["objects"])

    def next_of(self, stream: Any) -> bytes:
        return self._translated(lambda: next(stream, b""))

    def _translated(self, call: Callable[[], _T]) -> _T:
        """What ``call`` returns. That library's errors have many lines, and the address with all
        that it holds: nothing of them is passed on, nor are they kept as a cause.
        """
        try:
            return call()
        except (
            FileNotFoundError,
            OSError,
            ValueError,
            self._library.exceptions.BaseError,
        ) as error:
            failure = self._failure(error)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of that library's own making
                raise
            failure = RefusedError(f"the settings in {_VARIABLES[self._scheme]} cannot be used")
        raise failure

    def _failure(self, error: Exception) -> Exception:
        text = str(error)
        found = _STATUS.search(text)
        status = int(found[1]) if found else 0
        if isinstance(error, FileNotFoundError):
            missing = "NoSuchBucket" in text or "container does not exist" in text
            what = "no such bucket" if missing else "the server answers 404 Not Found"
            return RefusedError(what, is_absent=True)
        if _METADATA.search(text):
            return RefusedError(
                f"no credentials: set {_VARIABLES[self._scheme]} in the environment"
                + (" (AWS_SKIP_SIGNATURE=true for a public bucket)" if self._scheme == "s3" else "")
            )
        if status == 416:
            return _NoRangeError()
        if status in _MAY_PASS:
            return BrokenError(f"the server answers {status}")
        if "configured region" in text or (status in (301, 400) and self._scheme == "s3"):
            return RefusedError("the server refuses: is AWS_REGION that of the bucket?")
        if status:
            return RefusedError(f"the server answers {status}", is_absent=status in (403, 404, 410))
        name = type(error).__name__
        if name == "NotSupportedError" or "non-partial response" in text:
            return RefusedError("the server does not send ranges of a file")
        if name != "GenericError" or isinstance(error, ValueError):
            return RefusedError(
                f"the settings in {_VARIABLES[self._scheme]} cannot be used ({name})"
            )
        if "UnexpectedRange" in text:
            return RefusedError("the server sends another range than it was asked for")
        if "scheme is not allowed" in text or "BadScheme" in text:
            return self._plain_http()
        if "missing from response" in text:
            return RefusedError("the answer lacks what servers of this kind always send")
        if "timed out" in text or "TimedOut" in text:
            return BrokenError("nothing came from the server")
        if _is_plain_http(self._scheme):
            return self._plain_http()
        return BrokenError("the connection broke")

    def _plain_http(self) -> RefusedError:
        variable = _VARIABLES[self._scheme].replace("*", "ALLOW_HTTP")
        return RefusedError(f"the endpoint is http: set {variable}=true if that is meant")


def _is_plain_http(scheme: str) -> bool:
    """True if the environment names an endpoint of ``http://`` and does not allow it."""
    start = _VARIABLES[scheme].rstrip("*")
    settings = {name.upper(): value.lower() for name, value in os.environ.items()}
    endpoints = (v for n, v in settings.items() if n.startswith(start) and "ENDPOINT" in n)
    is_allowed = settings.get(f"{start}ALLOW_HTTP", "") in ("1", "true", "yes", "on")
    return not is_allowed and any(value.startswith("http://") for value in endpoints)


def _in_ms(seconds: float) -> str:
    return f"{max(round(seconds * 1000), 1)}ms"


class _NoRangeError(Exception):
    """The range lies behind the end: the file is empty."""


class _Nothing(Answer):
    """Of an empty file."""

    told = Told(0, 0, 0, "")

    def read_some(self, buffer: memoryview, wait_s: float) -> int:
        del buffer, wait_s
        return 0

    def close(self) -> None:
        pass


class _BucketAnswer(Answer):
    def __init__(self, transport: BucketTransport, result: Any, told: Told) -> None:
        self.told = told
        self._transport = transport
        self._stream = iter(result.stream(min_chunk_size=_STREAMED_BYTES))
        self._held = memoryview(b"")

    def read_some(self, buffer: memoryview, wait_s: float) -> int:
        del wait_s
        if not self._held:
            self._held = memoryview(self._transport.next_of(self._stream))
        count = min(self._held.nbytes, buffer.nbytes)
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def close(self) -> None:
        self._held = memoryview(b"")
        del self._stream
