"""GGUF files byte by byte, for what no writer writes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

F32 = 0


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + data


def info(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """What the header says of one tensor; ``dims`` columns first."""
    sizes = b"".join(struct.pack("<Q", size) for size in dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def header(pairs: Sequence[bytes], infos: Sequence[bytes], *, version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(infos), len(pairs))
    return b"GGUF" + counts + b"".join((*pairs, *infos))
