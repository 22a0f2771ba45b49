"""Cuts targets into slabs: runs of a target's elements that are made complete, then let go.

The mirror image of ``chunks``: there a stored tensor is cut, here a target is. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from streamload.core.dtypes import BY_NAME
from streamload.core.specs import Move, numel
from streamload.engine.chunks import Part, cut
from streamload.mapping.layout import coalesced, inverse
from streamload.planning.records import PlannedTensor

__all__ = ["Slab", "batches"]


@dataclass(frozen=True, slots=True)
class Slab:
    """Elements ``start`` … of the target ``name``; ``planned`` makes just these, flat."""

    name: str
    start: int
    planned: PlannedTensor


def batches(tensors: Sequence[PlannedTensor], budget_bytes: int) -> Iterator[list[Slab]]:
    """All targets in order, as lists of slabs of at most about ``budget_bytes`` each."""
    batch: list[Slab] = []
    held = 0
    for tensor in tensors:
        for slab in _slabs(tensor, budget_bytes):
            size = slab.planned.nbytes
            if batch and held + size > budget_bytes:
                yield batch
                batch, held = [], 0
            batch.append(slab)
            held += size
    if batch:
        yield batch


def _slabs(tensor: PlannedTensor, budget_bytes: int) -> Iterator[Slab]:
    if tensor.nbytes <= budget_bytes:
        shape = (numel(tensor.shape),)
        yield Slab(tensor.name, 0, replace(tensor, shape=shape, strides=(1,)))
        return
    itemsize = BY_NAME[tensor.dtype].itemsize
    backwards = [(i, inverse(move, tensor.name)) for i, move in enumerate(tensor.moves)]
    # A block of the backwards moves is a run of target elements and what goes there.
    for block in cut(
        backwards,
        itemsize=itemsize,
        chunk_bytes=budget_bytes,
        staging_bytes=budget_bytes,
        staged_itemsize=itemsize,
    ):
        moves = tuple(_forwards(part, tensor.moves[part.target]) for part in block.parts)
        part_of = replace(tensor, shape=(block.stop - block.start,), strides=(1,), moves=moves)
        yield Slab(tensor.name, block.start, part_of)


def _forwards(part: Part, move: Move) -> Move:
    axes = list(zip(part.shape, part.target_strides, part.source_strides, strict=True))
    return coalesced(move.stored_name, axes, part.target_offset, part.source_offset)
