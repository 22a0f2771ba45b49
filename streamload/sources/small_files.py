"""Small files beside the weights, read whole and strictly: a bounded size, the standard's JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from streamload.core.errors import CheckpointError
from streamload.sources.files import open_file

_MAX_BYTES = 16 << 20
# What a reader makes of JSON: bytes for each container, pair and value, about; and how many
# there may be, with how many more for each byte of text. Published headers and indexes make 4 to
# 13 of a byte.
_CONTAINER_BYTES, _PAIR_BYTES, _VALUE_BYTES = 90, 200, 45
_BUILT_BYTES, _BUILT_PER_BYTE = 32 << 20, 14
_MAX_DEPTH = 128
"""How deep arrays and objects may nest: what the reference's reader of headers takes."""
_MAX_SHOWN = 200
_BLOCK_BYTES = 1 << 16
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))


def read_small(path: str, *, max_bytes: int = _MAX_BYTES) -> bytes:
    """All bytes of a file, without a byte order mark.

    Raises:
        CheckpointNotFoundError: there is nothing at the path.
        CheckpointError: not a regular file, not readable, or of more than ``max_bytes`` bytes.
    """
    with open_file(path) as file:
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
    except ValueError as error:
        raise CheckpointError(f"is not valid JSON: {error}", path=path) from error


def read_object(path: str) -> dict[str, Any]:
    """The object in a JSON file; raises as ``read_json``, and CheckpointError for other values."""
    value: object = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", path=path)
    return value


def dumped(value: object) -> bytes:
    """A value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def loads_strictly(text: bytes) -> Any:
    """JSON as the standard has it: UTF-8, no key twice, no NaN; not nested too deep, nor of so many
    values that a small text stands for a large object.

    How deep the interpreter's own reader goes differs by its version, and code behind it, which
    walks what was read, would go less deep than some.

    Raises:
        ValueError: anything else.
    """
    if _is_deeper(text, _MAX_DEPTH):
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
    built = (
        _CONTAINER_BYTES * (text.count(b"[") + text.count(b"{"))
        + _PAIR_BYTES * text.count(b":")
        + _VALUE_BYTES * text.count(b",")
    )
    if built > _BUILT_BYTES + _BUILT_PER_BYTE * len(text):
        raise ValueError("it holds more values than text of its size should")
    return json.loads(
        text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant
    )


def _is_deeper(text: bytes, most: int) -> bool:
    """True if arrays and objects nest deeper than ``most``; any answer for what is no JSON."""
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    # What is left of strings without brackets is two quotes; others are taken out one by one.
    marks = text.translate(_ONE_KIND, _NO_MARKS).replace(b'""', b"")
    brackets = _without_strings(marks) if b'"' in marks else marks
    for _ in range(most):  # each round takes away the innermost level
        before, brackets = brackets, brackets.replace(b"[]", b"")
        if brackets == before or b"[" * most in brackets:  # no JSON, or hopeless
            return len(brackets) > most
    return bool(brackets)


def _without_strings(marks: bytes) -> bytes:
    """What is not between two quotes; a block at a time, as there may be millions of them."""
    kept: list[bytes] = []
    inside = 0
    for start in range(0, len(marks), _BLOCK_BYTES):
        parts = marks[start : start + _BLOCK_BYTES].split(b'"')
        kept.append(b"".join(parts[inside::2]))
        inside ^= (len(parts) - 1) & 1
    return b"".join(kept)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"duplicate key {twice[:_MAX_SHOWN]!r}")
    return unique


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
