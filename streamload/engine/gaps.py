"""Elements that nobody wants, between those that are: read through where short, else left out.

What a rank holds of a stored tensor is often the same part of each of its rows. Such a move is
read row by row into one buffer, end to end, as if the file held nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeAlias

from streamload.core.specs import StridedCopy, numel
from streamload.mapping.layout import coalesced
from streamload.sources.wrapping.reader import Reader

# Longer rows are read by themselves.
_LONG_BYTES = 256 << 10

# (number of the target, move) of one stored tensor.
Moves: TypeAlias = "Sequence[tuple[int, StridedCopy]]"


@dataclass(frozen=True, slots=True)
class Rows:
    """Runs of ``width`` stored elements, ``stride`` apart, counted as if they lay end to end."""

    start: int
    stride: int
    width: int

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where the elements [start, stop) of those end to end are stored."""
        while start < stop:
            row, at = divmod(start, self.width)
            count = min(self.width - at, stop - start)
            first = self.start + row * self.stride + at
            yield first, first + count
            start += count


class RowReader(Reader):
    """Reads what lies in rows of one tensor, end to end."""

    def __init__(self, read: Reader, rows: Rows, itemsize: int) -> None:
        self._read = read
        self._rows = rows
        self._size = itemsize
        self.held = None
        self.quantum, self.at_once = 1, 0

    def __call__(self, start: int, stop: int, buffer: memoryview, /) -> None:
        """Fill ``buffer``, which is the caller's throughout, with the elements [start, stop)."""
        rows, size = self._rows, self._size
        # What begins or ends inside of a row, and whole rows between.
        head = min(-start % rows.width, stop - start)
        tail = start + head + (stop - start - head) // rows.width * rows.width
        for first, last in rows.runs(start, start + head):
            self._read(first, last, buffer[: head * size])
        if tail > start + head:
            row = (start + head) // rows.width
            inside = buffer[head * size : (tail - start) * size]
            self._read.rows(rows.start + row * rows.stride, rows.width, rows.stride, inside)
        for first, last in rows.runs(tail, stop):
            self._read(first, last, buffer[(tail - start) * size :])


def apart(copies: Moves, itemsize: int, gap_bytes: int) -> Iterator[tuple[Moves, Rows | None]]:
    """The moves of one stored tensor in groups that have no gap of ``gap_bytes`` or more inside.

    With Rows, the group's moves count their source elements as these do.
    """
    gap = -(-gap_bytes // itemsize)
    for group in _groups(copies, gap):
        span = max(c.source_end for _, c in group) - min(c.source_offset for _, c in group)
        if span - sum(numel(c.shape) for _, c in group) < gap:
            yield group, None
            continue
        level = {move: _sparse_axis(move[1], gap) for move in group}
        dense = [move for move in group if level[move] is None]
        yield from ((some, None) for some in _groups(dense, gap))
        sparse = [
            _Sparse(target, part, axis)
            for (target, copy), at in level.items()
            if at is not None
            for part, axis in _inside(copy, at)
        ]
        for some in _side_by_side(sparse, gap):
            yield from _together(some, gap, _LONG_BYTES // itemsize)


def _groups(copies: Moves, gap: int) -> Iterator[Moves]:
    """Moves that no gap divides, in the order of the file."""
    group: list[tuple[int, StridedCopy]] = []
    end = 0
    for target, copy in sorted(copies, key=lambda move: move[1].source_offset):
        if group and copy.source_offset - end >= gap:
            yield group
            group = []
        end = max(end, copy.source_end) if group else copy.source_end
        group.append((target, copy))
    if group:
        yield group


def _sparse_axis(copy: StridedCopy, gap: int) -> int | None:
    """The innermost axis that steps over a gap, or None."""
    width = 1
    for at in range(len(copy.shape) - 1, -1, -1):
        size, stride = copy.shape[at], copy.source_strides[at]
        if size > 1 and stride - width >= gap:
            return at
        width += (size - 1) * stride
    return None


class _Sparse(NamedTuple):
    """A move whose first axis steps over a gap."""

    target: int
    copy: StridedCopy
    width: int

    @property
    def kind(self) -> tuple[int, int, int]:
        """What rows that are read together have in common, and then where they begin."""
        return self.copy.shape[0], self.copy.source_strides[0], self.copy.source_offset


def _inside(copy: StridedCopy, axis: int) -> Iterator[tuple[StridedCopy, int]]:
    """The move for each place along the axes before ``axis``, and how wide a row of it is."""
    inner = zip(copy.shape[axis + 1 :], copy.source_strides[axis + 1 :], strict=True)
    width = 1 + sum((n - 1) * s for n, s in inner)
    for place in product(*map(range, copy.shape[:axis])):
        yield _at(copy, place), width


def _at(copy: StridedCopy, place: Sequence[int]) -> StridedCopy:
    """The move for one place along its first axes."""
    count = len(place)
    source = sum(i * s for i, s in zip(place, copy.source_strides, strict=False))
    target = sum(i * s for i, s in zip(place, copy.target_strides, strict=False))
    return StridedCopy(
        copy.stored_name,
        copy.shape[count:] or (1,),
        copy.source_strides[count:] or (1,),
        copy.source_offset + source,
        copy.target_strides[count:] or (1,),
        copy.target_offset + target,
    )


def _side_by_side(moves: Sequence[_Sparse], gap: int) -> Iterator[list[_Sparse]]:
    """Moves whose rows lie beside or across each other, so that they are read together."""
    group: list[_Sparse] = []
    end = 0
    for move in sorted(moves, key=lambda move: move.kind):
        start = move.copy.source_offset
        if group and (move.kind[:2] != group[0].kind[:2] or start - end >= gap):
            yield group
            group = []
        end = max(end, start + move.width) if group else start + move.width
        group.append(move)
    if group:
        yield group


def _together(group: Sequence[_Sparse], gap: int, long: int) -> Iterator[tuple[Moves, Rows | None]]:
    count, stride, start = group[0].kind
    width = max(move.copy.source_offset + move.width for move in group) - start
    if stride - width < gap:  # each fills the others' gaps
        yield [(move.target, move.copy) for move in group], None
    elif width >= long:
        for row in range(count):
            yield [(move.target, _at(move.copy, (row,))) for move in group], None
    else:
        packed = [(move.target, _packed(move.copy, start, width)) for move in group]
        yield packed, Rows(start, stride, width)


def _packed(copy: StridedCopy, start: int, width: int) -> StridedCopy:
    """The move out of rows of ``width``, the first at ``start``; one run if it is that."""
    strides = (width, *copy.source_strides[1:])
    axes = list(zip(copy.shape, strides, copy.target_strides, strict=True))
    return coalesced(copy.stored_name, axes, copy.source_offset - start, copy.target_offset)
