"""Cuts the copies of a stored tensor into blocks of bounded size: pure arithmetic.

A Block is a run of stored elements that one worker reads, and where its parts go. Two kinds:
read and copy straight on (casting), at most ``chunk_bytes``; or, where a part is a transposition,
cast a panel of whole rows into staging first and copy that once, since writing columns in small
steps touches the destination's memory many times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, lcm
from typing import NamedTuple

from streamload.core.specs import Shape, StridedCopy, numel
from streamload.engine.gaps import Moves, Rows, apart


class Part(NamedTuple):
    """One strided copy out of a block; ``source_offset`` counts from the block's start."""

    target: int
    shape: Shape
    source_strides: Shape
    source_offset: int
    target_strides: Shape
    target_offset: int


class Chunk(NamedTuple):
    """Stored elements ``start`` to ``stop`` of one tensor, and the copies to make of them.

    ``staged``: cast all of it into staging first. ``direct``: the part is one contiguous run on
    both sides, so that bytes of equal dtype can be read straight into the destination. With
    ``rows``, ``start`` and ``stop`` count what lies in these, end to end.
    """

    stored_name: str
    start: int
    stop: int
    parts: tuple[Part, ...]
    staged: bool = False
    direct: bool = False
    rows: Rows | None = None


def runs_of(chunks: Sequence[Chunk]) -> Iterator[tuple[int, int]]:
    """The stored elements that blocks read, as (start, stop)."""
    for chunk in chunks:
        if chunk.rows is None:
            yield chunk.start, chunk.stop
        else:
            yield from chunk.rows.runs(chunk.start, chunk.stop)


def unwanted_in(chunks: Sequence[Chunk]) -> int:
    """How many elements blocks read that no part takes."""
    taken = [sum([numel(part.shape) for part in chunk.parts]) for chunk in chunks]
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    return sum([max(size - count, 0) for size, count in zip(sizes, taken, strict=True)])


def cut(
    copies: Sequence[tuple[int, StridedCopy]],
    *,
    itemsize: int,
    chunk_bytes: int,
    staging_bytes: int,
    staged_itemsize: int,
    quantum: int = 1,
    gap_bytes: int = 0,
) -> Iterator[Chunk]:
    """Blocks that together carry out ``copies`` of one stored tensor.

    Args:
        copies: (number of the target, move); all of the same stored tensor.
        itemsize: bytes of a stored element.
        staged_itemsize: bytes of a target element.
        chunk_bytes: bound of a block that is copied straight on.
        staging_bytes: bound of a staged panel, in target bytes.
        quantum: blocks begin and end at multiples of so many elements, as far as copies do.
        gap_bytes: gaps of this length and more between the copies' elements are not read; 0: all
            of them are.
    """
    sizes = _Sizes(itemsize, chunk_bytes, staging_bytes, staged_itemsize)
    if not gap_bytes or (len(copies) == 1 and copies[0][1].is_run):
        yield from _cut(copies, sizes, quantum)
        return
    for group, rows in apart(copies, itemsize, gap_bytes):
        for chunk in _cut(group, sizes, quantum if rows is None else 1):
            yield chunk if rows is None else chunk._replace(rows=rows)


class _Sizes(NamedTuple):
    """Bytes of elements, and bounds of what is read and staged at once."""

    itemsize: int
    chunk_bytes: int
    staging_bytes: int
    staged_itemsize: int


def _cut(copies: Moves, sizes: _Sizes, quantum: int) -> Iterator[Chunk]:
    itemsize, chunk_bytes, staging_bytes, staged_itemsize = sizes
    name = copies[0][1].stored_name
    if len(copies) == 1 and copies[0][1].is_run:
        step = max(chunk_bytes // itemsize // quantum, 1) * quantum
        yield from _runs(name, *copies[0], step, quantum)
        return
    first = min(copy.source_offset for _, copy in copies)
    last = max(copy.source_end for _, copy in copies)
    unit = _row_unit(copies, last)
    unit = min(lcm(unit, quantum), last)
    staged = any(copy.turns for _, copy in copies)
    budget = staging_bytes // staged_itemsize if staged else chunk_bytes // itemsize
    step = max(budget // unit, 1) * unit
    start = first // unit * unit
    while start < last:
        stop = min(start + step, last)
        parts = tuple(
            part for target, copy in copies if (part := _part(target, copy, start, start + step))
        )
        if parts:
            yield Chunk(name, start, stop, parts, staged)
        start += step


def _runs(name: str, target: int, copy: StridedCopy, step: int, quantum: int) -> Iterator[Chunk]:
    begin, count, at = copy.source_offset, copy.shape[0], 0
    while at < count:
        # The first block ends where a quantum does, if the run begins inside of one.
        size = min(step - (begin + at) % quantum, count - at)
        part = Part(target, (size,), (1,), 0, (1,), copy.target_offset + at)
        yield Chunk(name, begin + at, begin + at + size, (part,), direct=True)
        at += size


def _row_unit(copies: Sequence[tuple[int, StridedCopy]], last: int) -> int:
    """Block borders at multiples of this cut no move inside a row."""
    unit = 1
    for _, copy in copies:
        stride = copy.source_strides[0]
        unit = unit * stride // gcd(unit, stride)
    for _, copy in copies:
        stride = copy.source_strides[0]
        inner = zip(copy.shape[1:], copy.source_strides[1:], strict=True)
        span = sum((n - 1) * s for n, s in inner) + 1
        if copy.source_offset % stride + span > stride:
            return last  # rows lie across each other: only the whole is a safe block
    return min(unit, last)


def _part(target: int, copy: StridedCopy, start: int, stop: int) -> Part | None:
    """The rows of ``copy`` that begin inside [start, stop)."""
    stride = copy.source_strides[0]
    low = max(-(-(start - copy.source_offset) // stride), 0)
    high = min(-(-(stop - copy.source_offset) // stride), copy.shape[0])
    if low >= high:
        return None
    return Part(
        target,
        (high - low, *copy.shape[1:]),
        copy.source_strides,
        copy.source_offset + low * stride - start,
        copy.target_strides,
        copy.target_offset + low * copy.target_strides[0],
    )
