"""Which lane serves a device."""

from __future__ import annotations

from streamload.engine.cpu import CpuLane
from streamload.engine.lane import Lane

__all__ = ["lane_for"]


def lane_for(device: str, *, chunk_bytes: int) -> Lane:
    """The lane for ``device``."""
    del device
    return CpuLane(chunk_bytes=chunk_bytes)
