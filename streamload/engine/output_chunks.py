"""Cuts targets into output chunks: runs of a target's elements that are made complete, then let go.

The mirror image of ``chunks``: there a stored tensor is cut, here a target is. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from streamload.core.dtypes import BY_NAME
from streamload.core.specs import StridedCopy, numel
from streamload.engine.chunks import Part, cut
from streamload.engine.execute import Execution, execute
from streamload.engine.lanes.base import Lane
from streamload.mapping.layout import coalesced, inverse
from streamload.planning.records import Plan, PlannedTensor
from streamload.sources.base import Source


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Elements ``start`` … of the target ``name``; ``planned`` makes just these, flat."""

    name: str
    start: int
    planned: PlannedTensor

    @property
    def key(self) -> str:
        """A name of its own among all chunks."""
        return f"{self.name}\0{self.start}"


def batches(tensors: Sequence[PlannedTensor], budget_bytes: int) -> Iterator[list[OutputChunk]]:
    """All targets in order, as lists of output chunks of at most about ``budget_bytes`` each."""
    batch: list[OutputChunk] = []
    held = 0
    for tensor in tensors:
        for chunk in _chunks(tensor, budget_bytes):
            size = chunk.planned.nbytes
            if batch and held + size > budget_bytes:
                yield batch
                batch, held = [], 0
            batch.append(chunk)
            held += size
    if batch:
        yield batch


def execute_chunks(
    plan: Plan, source: Source, chunks: Sequence[OutputChunk], lane: Lane
) -> Execution:
    """Make chunks of a plan's targets; ``.tensors`` has them flat, by ``OutputChunk.key``."""
    tensors = tuple(replace(chunk.planned, name=chunk.key) for chunk in chunks)
    names = dict.fromkeys(name for tensor in tensors for name in tensor.sources)
    # Many are taken in the order of the files, which is what reads ahead.
    order = names if len(names) < 64 else [name for name in plan.stored if name in names]
    stored = {name: plan.stored[name] for name in order}
    run = execute(replace(plan, tensors=tensors, comparisons=(), stored=stored), source, lane)
    targets = {chunk.key: chunk.name for chunk in chunks}
    run.findings = [replace(f, tensor=targets.get(f.tensor, f.tensor)) for f in run.findings]
    return run


def _chunks(tensor: PlannedTensor, budget_bytes: int) -> Iterator[OutputChunk]:
    if tensor.nbytes <= budget_bytes:
        shape = (numel(tensor.shape),)
        yield OutputChunk(tensor.name, 0, replace(tensor, shape=shape, strides=(1,)))
        return
    itemsize = BY_NAME[tensor.dtype].itemsize
    backwards = [(i, inverse(copy, tensor.name)) for i, copy in enumerate(tensor.copies)]
    # A block of the backwards copies is a run of target elements and what goes there.
    for chunk in cut(
        backwards,
        itemsize=itemsize,
        chunk_bytes=budget_bytes,
        staging_bytes=budget_bytes,
        staged_itemsize=itemsize,
    ):
        copies = tuple(_forwards(part, tensor.copies[part.target]) for part in chunk.parts)
        part_of = replace(tensor, shape=(chunk.stop - chunk.start,), strides=(1,), copies=copies)
        yield OutputChunk(tensor.name, chunk.start, part_of)


def _forwards(part: Part, copy: StridedCopy) -> StridedCopy:
    axes = list(zip(part.shape, part.target_strides, part.source_strides, strict=True))
    return coalesced(copy.stored_name, axes, part.target_offset, part.source_offset)
