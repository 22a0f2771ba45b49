"""Which lane serves a device."""

from __future__ import annotations

import torch

from streamload.engine.cpu import CpuLane
from streamload.engine.lane import Lane

__all__ = ["lane_for", "unusable"]


def unusable(device: str) -> str | None:
    """Why tensors cannot be loaded to ``device``, or None if they can."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        return f"device {device!r} is not one that torch knows"
    return None if kind == "cpu" else f"device {device!r} is not available here"


def lane_for(device: str, *, chunk_bytes: int) -> Lane:
    """The lane for ``device``."""
    del device
    return CpuLane(chunk_bytes=chunk_bytes)
