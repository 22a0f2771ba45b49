"""Strided copies with casts out of staging, and the counting of what overflows in them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from streamload.engine.casts import saturated, saturates
from streamload.engine.lanes.base import Destination
from streamload.engine.lanes.ring import DeviceOps, Move, Stream

# torch has no isfinite() for the 8-bit floats.
_FINITE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What one kernel may copy for many tensors at once.
_TOGETHER = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_COUNTERS = 512


def scatter(move: Move) -> None:
    """Write one part of a block to its place, casting; overflows are added to ``move.lost``."""
    picked, view = _views(move)
    view.copy_(picked)
    if move.lost is not None:
        _count(picked, view, move.lost)


def scatter_all(moves: Sequence[Move]) -> None:
    """As ``scatter`` for each; runs that are not cast go together, dtype by dtype."""
    runs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for move in moves:
        part, dtype = move.part, move.target.dtype
        is_run = part.source_strides == (1,) == part.target_strides
        is_plain = dtype == move.source.dtype and dtype in _TOGETHER
        if is_run and is_plain and not move.target.is_inference():
            picked, view = _views(move)
            targets, sources = runs.setdefault(dtype, ([], []))
            targets.append(view)
            sources.append(picked)
        else:
            scatter(move)
    for targets, sources in runs.values():
        torch._foreach_copy_(targets, sources)


def _views(move: Move) -> tuple[Tensor, Tensor]:
    """The elements that are taken, and where they go: views of equal shape."""
    source, start, part, target, _ = move
    offset = source.storage_offset() + start + part.source_offset
    picked = torch.as_strided(source, part.shape, part.source_strides, offset)
    offset = target.storage_offset() + part.target_offset
    return picked, torch.as_strided(target, part.shape, part.target_strides, offset)


def _count(picked: Tensor, view: Tensor, lost: Tensor) -> None:
    if saturates(view.dtype):
        lost += saturated(picked, view.dtype).sum().to(lost.device)
    else:
        # No look at the values from the host, which would have to wait for them.
        lost += (_finite(picked) - _finite(view).to(picked.device)).to(lost.device)


def _finite(values: Tensor) -> Tensor:
    return torch.isfinite(values if values.dtype in _FINITE else values.float()).sum()


class OverflowCounts:
    """Overflows of each destination, counted where the casts are made, read once at the end.

    Args:
        ops: the device.
        stream: where counting is queued.
    """

    def __init__(self, ops: DeviceOps, stream: Stream) -> None:
        self._ops = ops
        self._stream = stream
        self._blocks: list[tuple[Tensor, list[Destination]]] = []
        self._of: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def of(self, destination: Destination) -> Tensor:
        """The scalar that counts for ``destination``."""
        with self._lock:
            found = self._of.get(id(destination))
            if found is None:
                if not self._blocks or len(self._blocks[-1][1]) == _COUNTERS:
                    self._blocks.append((self._ops.counters(_COUNTERS, self._stream), []))
                counters, owners = self._blocks[-1]
                found = self._of[id(destination)] = counters[len(owners)]
                owners.append(destination)
            return found

    def add_up(self) -> None:
        """Add all counts to their destinations; nothing may be under way, or be queued beside."""
        blocks, self._blocks, self._of = self._blocks, [], {}
        for counters, owners in blocks:
            for destination, lost in zip(owners, counters.tolist(), strict=False):
                destination.overflows += lost
