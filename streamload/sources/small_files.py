"""Small files beside the weights, read whole and strictly: a bounded size, the standard's JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from streamload.core.errors import CheckpointError
from streamload.sources.files import OpenFile

_MAX_BYTES = 16 << 20


def read_small(path: str, *, max_bytes: int = _MAX_BYTES) -> bytes:
    """All bytes of a file, without a byte order mark.

    Raises:
        CheckpointNotFoundError: there is nothing at the path.
        CheckpointError: not a regular file, not readable, or of more than ``max_bytes`` bytes.
    """
    with OpenFile(path) as file:
        if file.size_bytes > max_bytes:
            raise CheckpointError(
                f"has {file.size_bytes} bytes, expected at most {max_bytes}", path=path
            )
        return file.read(0, file.size_bytes).removeprefix(b"\xef\xbb\xbf")


def read_json(path: str, *, max_bytes: int = _MAX_BYTES) -> Any:
    """What a JSON file holds; raises as ``read_small``, and CheckpointError for other text."""
    text = read_small(path, max_bytes=max_bytes)
    try:
        return loads_strictly(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON: {error}", path=path) from error


def read_object(path: str) -> dict[str, Any]:
    """The object in a JSON file; raises as ``read_json``, and CheckpointError for other values."""
    value: object = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", path=path)
    return value


def loads_strictly(text: bytes) -> Any:
    """JSON as the standard has it: UTF-8, no key twice, no NaN.

    Raises:
        ValueError: anything else.
    """
    return json.loads(
        text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"duplicate key {next(k for k, n in counts.items() if n > 1)!r}")
    return unique


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
