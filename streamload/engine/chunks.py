"""Cuts the moves of a stored tensor into blocks of bounded size: pure arithmetic.

A Block is a run of stored elements that one worker reads, and where its parts go. Two kinds:
read and copy straight on (casting), at most ``chunk_bytes``; or, where a part is a transposition,
cast a panel of whole rows into staging first and copy that once, since writing columns in small
steps touches the destination's memory many times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from streamload.core.specs import Move, Shape

__all__ = ["Block", "Part", "cut"]


@dataclass(frozen=True, slots=True)
class Part:
    """One strided copy out of a block; ``source_offset`` counts from the block's start."""

    target: int
    shape: Shape
    source_strides: Shape
    source_offset: int
    target_strides: Shape
    target_offset: int


@dataclass(frozen=True, slots=True)
class Block:
    """Stored elements ``start`` to ``stop`` of one tensor, and the copies to make of them.

    ``staged``: cast all of it into staging first. ``direct``: the part is one contiguous run on
    both sides, so that bytes of equal dtype can be read straight into the destination.
    """

    stored_name: str
    start: int
    stop: int
    parts: tuple[Part, ...]
    staged: bool = False
    direct: bool = False


def cut(
    moves: Sequence[tuple[int, Move]],
    *,
    itemsize: int,
    chunk_bytes: int,
    staging_bytes: int,
    staged_itemsize: int,
) -> Iterator[Block]:
    """Blocks that together carry out ``moves`` of one stored tensor.

    Args:
        moves: (number of the target, move); all of the same stored tensor.
        itemsize: bytes of a stored element.
        staged_itemsize: bytes of a target element.
        chunk_bytes: bound of a block that is copied straight on.
        staging_bytes: bound of a staged panel, in target bytes.
    """
    name = moves[0][1].stored_name
    first = min(move.source_offset for _, move in moves)
    last = max(_end(move) for _, move in moves)
    if len(moves) == 1 and _is_run(moves[0][1]):
        yield from _runs(name, *moves[0], max(chunk_bytes // itemsize, 1))
        return
    unit = _row_unit(moves, last)
    staged = any(move.turns for _, move in moves)
    budget = staging_bytes // staged_itemsize if staged else chunk_bytes // itemsize
    step = max(budget // unit, 1) * unit
    start = first // unit * unit
    while start < last:
        stop = min(start + step, last)
        parts = tuple(
            part for target, move in moves if (part := _part(target, move, start, start + step))
        )
        if parts:
            yield Block(name, start, stop, parts, staged)
        start += step


def _runs(name: str, target: int, move: Move, step: int) -> Iterator[Block]:
    begin, count = move.source_offset, move.shape[0]
    for at in range(0, count, step):
        size = min(step, count - at)
        part = Part(target, (size,), (1,), 0, (1,), move.target_offset + at)
        yield Block(name, begin + at, begin + at + size, (part,), direct=True)


def _is_run(move: Move) -> bool:
    return move.source_strides == (1,) and move.target_strides == (1,)


def _end(move: Move) -> int:
    """One past the last stored element the move reads."""
    spans = zip(move.shape, move.source_strides, strict=True)
    return move.source_offset + sum((n - 1) * s for n, s in spans) + 1


def _row_unit(moves: Sequence[tuple[int, Move]], last: int) -> int:
    """Block borders at multiples of this cut no move inside a row."""
    unit = 1
    for _, move in moves:
        stride = move.source_strides[0]
        unit = unit * stride // gcd(unit, stride)
    for _, move in moves:
        stride = move.source_strides[0]
        inner = zip(move.shape[1:], move.source_strides[1:], strict=True)
        span = sum((n - 1) * s for n, s in inner) + 1
        if move.source_offset % stride + span > stride:
            return last  # rows lie across each other: only the whole is a safe block
    return min(unit, last)


def _part(target: int, move: Move, start: int, stop: int) -> Part | None:
    """The rows of ``move`` that begin inside [start, stop)."""
    stride = move.source_strides[0]
    low = max(-(-(start - move.source_offset) // stride), 0)
    high = min(-(-(stop - move.source_offset) // stride), move.shape[0])
    if low >= high:
        return None
    return Part(
        target,
        (high - low, *move.shape[1:]),
        move.source_strides,
        move.source_offset + low * stride - start,
        move.target_strides,
        move.target_offset + low * move.target_strides[0],
    )
