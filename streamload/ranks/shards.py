"""What a rank holds of a tensor, as boxes: pure numbers, whatever laid them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import TypeAlias

from streamload.core.specs import Shape
from streamload.mapping.layout import Layout

# (first place, how many) along one dimension, one behind the other in what a rank holds.
_Runs: TypeAlias = "tuple[tuple[int, int], ...]"


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor without gaps.

    Attributes:
        start: of its first element, in the whole tensor.
        place: of its first element, in what the rank holds.
    """

    start: Shape
    shape: Shape
    place: Shape


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a tensor; ``shape`` is of the rank's own, which the boxes fill."""

    shape: Shape
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """One dimension of a mesh cuts one dimension of a tensor.

    As ``torch.chunk``: parts of ceil(size / parts), the last ones shorter or empty.

    Attributes:
        dim: of the tensor.
        parts: how many ranks share it.
        at: which of them this rank is.
        groups: the dimension is first cut into so many groups, and each of them into parts
            (torch's strided shards, and fused weights that are cut one by one).
    """

    dim: int
    parts: int
    at: int
    groups: int = 1


@lru_cache(maxsize=4096)
def shard_of(shape: Shape, cuts: tuple[Cut, ...]) -> Shard:
    """What is left to a rank of a tensor of ``shape`` that is cut by each of ``cuts`` in turn."""
    if not shape:
        return Shard((), (Box((), (), ()),))
    runs: list[_Runs] = [((0, size),) for size in shape]
    for cut in cuts:
        runs[cut.dim] = _cut(runs[cut.dim], cut)
    local = tuple([sum(count for _, count in some) for some in runs])
    placed = [tuple(_placed(some)) for some in runs]
    boxes = []
    for corner in product(*placed):
        starts, counts, places = (tuple(column) for column in zip(*corner, strict=True))
        boxes.append(Box(starts, counts, places))
    return Shard(local, tuple(boxes))


def is_ambiguous(shape: Shape, cuts: Sequence[Cut]) -> bool:
    """True if what ranks hold depends on which of the cuts came first, which nothing tells.

    A grouped cut may say in advance what later, plain ones will cut (FSDP over tensor
    parallelism): the order is then the other one, and equal only for sizes that they divide.

    Args:
        shape: of the tensor.
        cuts: of any rank, in turn.
    """
    order = sorted(range(len(cuts)), key=lambda i: cuts[i].groups > 1)
    if not any(_says_in_advance(cuts, i) for i in order):
        return False
    for coordinate in product(*(range(cut.parts) for cut in cuts)):
        at = [replace(cut, at=i) for cut, i in zip(cuts, coordinate, strict=True)]
        turned = tuple([replace(at[i], groups=1) for i in order])
        if shard_of(shape, tuple(at)) != shard_of(shape, turned):
            return True
    return False


def _says_in_advance(cuts: Sequence[Cut], number: int) -> bool:
    cut = cuts[number]
    later = [other.parts for other in cuts[number + 1 :] if other.dim == cut.dim]
    return cut.groups > 1 and cut.groups == prod(later)


def part_of(layout: Layout, shard: Shard) -> Layout:
    """Where the elements of a rank's part come from: a move that meets a box is a move."""
    pieces = []
    for box in shard.boxes:
        inside = layout
        for dim, (start, count) in enumerate(zip(box.start, box.shape, strict=True)):
            if count != inside.shape[dim]:
                inside = inside.narrow(dim, start, count)
        for piece in inside.pieces:
            starts = tuple([a + b for a, b in zip(piece.starts, box.place, strict=True)])
            pieces.append(replace(piece, starts=starts))
    return Layout(shard.shape, tuple(pieces))


def _cut(runs: _Runs, cut: Cut) -> _Runs:
    size = sum(count for _, count in runs)
    found: list[tuple[int, int]] = []
    for low, high in _chunks(0, size, cut.groups):
        chunks = list(_chunks(low, high, cut.parts))
        found += _slice(runs, *chunks[cut.at])
    return tuple(_joined(found))


def _chunks(low: int, high: int, parts: int) -> Iterator[tuple[int, int]]:
    step = -(-(high - low) // parts)
    for at in range(parts):
        yield min(low + at * step, high), min(low + (at + 1) * step, high)


def _slice(runs: _Runs, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Places [low, high) of the runs laid end to end."""
    at = 0
    for start, count in runs:
        first, last = max(low - at, 0), min(high - at, count)
        if first < last:
            yield start + first, last - first
        at += count


def _joined(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Runs that continue each other are one."""
    start, count = 0, 0
    for first, more in runs:
        if count and first == start + count:
            count += more
            continue
        if count:
            yield start, count
        start, count = first, more
    if count:
        yield start, count


def _placed(runs: _Runs) -> Iterator[tuple[int, int, int]]:
    """(start, count, place) of each run."""
    place = 0
    for start, count in runs:
        yield start, count, place
        place += count
