"""A reader of safetensors headers that shares no code with what is measured.

Values are checked against it, so it stays apart from streamload's and from the safetensors
package's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Entry", "read_headers", "write_header"]

TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One stored tensor: where its bytes are and what they mean."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def torch_dtype(self) -> Any:
        import torch

        return getattr(torch, TORCH_NAMES[self.dtype])


def read_headers(files: Iterable[str]) -> dict[str, Entry]:
    """Name to entry of every tensor in ``files``, in file order."""
    found: dict[str, Entry] = {}
    for path in files:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        here = {}
        for name, item in header.items():
            begin, end = item["data_offsets"]
            shape = tuple(item["shape"])
            here[name] = Entry(path, item["dtype"], shape, 8 + length + begin, end - begin)
        found.update(sorted(here.items(), key=lambda pair: pair[1].offset))
    return found


def write_header(path: str, tensors: Iterable[tuple[str, tuple[int, ...], str, int]]) -> int:
    """Starts a file for ``(name, shape, dtype, nbytes)`` in this order; returns the data's start.

    The file gets its full length at once; what is not written after that is a hole.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, dtype, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return 8 + len(text)


def total_bytes(files: Iterable[str]) -> int:
    return sum(os.path.getsize(path) for path in files)
