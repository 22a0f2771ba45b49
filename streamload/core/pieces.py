"""A stored tensor that lies in pieces: boxes of it, each stored by itself. Pure arithmetic.

A run of the tensor's elements, in row-major order, crosses some of the pieces; what it takes of
each is contiguous in the piece and a strided view of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import ClassVar

from streamload.core.dtypes import BY_NAME
from streamload.core.encoding import Encoding
from streamload.core.specs import (
    Shape,
    contiguous_strides,
    is_row_major,
    numel,
)
from streamload.core.wording import plural

# Brought together at once: nothing is computed, so the engine's own blocks need not be cut.
_BYTES_AT_ONCE = 4 << 20
# Pairs of pieces that are compared where they are no grid: a few neighbours of each.
_COMPARED, _COMPARED_PER_PIECE = 20_000, 64


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: from ``offsets`` on, ``sizes`` elements along each dimension."""

    offsets: Shape
    sizes: Shape

    def __str__(self) -> str:
        ends = zip(self.offsets, self.sizes, strict=True)
        return f"[{', '.join(f'{at}:{at + size}' for at, size in ends)}]"

    def common(self, other: Box) -> Box | None:
        """What both hold; None if that is nothing."""
        pairs = list(zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        offsets = tuple([max(at, start) for at, _, start, _ in pairs])
        ends = [min(at + n, start + m) for at, n, start, m in pairs]
        sizes = tuple([end - at for at, end in zip(offsets, ends, strict=True)])
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


@dataclass(frozen=True, slots=True)
class Portion:
    """What a run takes of one piece; numbers in elements.

    Attributes:
        piece: its number.
        start, stop: of the piece's own elements.
        shape: of the portion.
        strides, offset: of the view of the run where it goes.
    """

    piece: int
    start: int
    stop: int
    shape: Shape
    strides: Shape
    offset: int

    @property
    def is_run(self) -> bool:
        """True if it is contiguous in the run, too."""
        return is_row_major(self.shape, self.strides)


@dataclass(frozen=True)
class Pieces(Encoding):
    """A tensor of ``shape`` whose elements lie in pieces that fill it, each element once.

    Its parts are the pieces, row-major, of the boxes' shapes.

    Attributes:
        boxes: where each piece is in the tensor.
    """

    kind: ClassVar[str] = "pieces"

    shape: Shape = ()
    boxes: tuple[Box, ...] = ()

    @property
    def words(self) -> str:
        return plural(len(self.parts), "piece")

    @property
    def at_once(self) -> int:
        return _BYTES_AT_ONCE // BY_NAME[self.stored_dtype].itemsize

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """From the first to behind the last element of each piece."""
        strides = contiguous_strides(self.shape)
        firsts = [_dot(box.offsets, strides) for box in self.boxes]
        reach = [_dot([n - 1 for n in box.sizes], strides) for box in self.boxes]
        return [(first, first + more + 1) for first, more in zip(firsts, reach, strict=True)]

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        # A run that begins or ends inside a row takes up to three portions of one piece.
        bounds: dict[int, tuple[int, int]] = {}
        for portion in self.portions(start, stop):
            first, last = bounds.get(portion.piece, (portion.start, portion.stop))
            bounds[portion.piece] = min(first, portion.start), max(last, portion.stop)
        for piece, (first, last) in bounds.items():
            yield piece, first, last

    def portions(self, start: int, stop: int) -> Iterator[Portion]:
        """What the elements [start, stop) take of each piece."""
        strides = contiguous_strides(self.shape)
        crossed = [n for n, (at, end) in enumerate(self._spans) if at < stop and end > start]
        for run in _boxes_of(self.shape, start, stop):
            for number in crossed:
                box = self.boxes[number]
                part = run.common(box)
                if part is None:
                    continue
                inside = [at - start for at, start in zip(part.offsets, box.offsets, strict=True)]
                first = _dot(inside, contiguous_strides(box.sizes))
                offset = _dot(part.offsets, strides) - start
                last = first + prod(part.sizes)
                yield Portion(number, first, last, part.sizes, strides, offset)


@dataclass(frozen=True)
class Agreeing(Encoding):
    """A tensor that several files hold, which must be the same in all of them, bit by bit."""

    kind: ClassVar[str] = "agreeing"

    @property
    def words(self) -> str:
        return plural(len(self.parts), "copy", "copies")

    @property
    def may_refuse(self) -> bool:
        return True

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        for part in range(len(self.parts)):
            yield part, start, stop


def tiling_fault(shape: Shape, boxes: Sequence[Box]) -> str:
    """Why ``boxes`` do not fill a tensor of ``shape``, each element once; nothing if they do.

    Boxes without elements do not count.
    """
    boxes = [box for box in boxes if 0 not in box.sizes]
    for box in boxes:
        if len(box.sizes) != len(shape) or len(box.offsets) != len(shape):
            return f"a piece has {len(box.sizes)} dimensions, the tensor {len(shape)}"
        ends = zip(box.offsets, box.sizes, shape, strict=True)
        if any(at < 0 or n < 0 or at + n > size for at, n, size in ends):
            return f"the piece {box} reaches out of the shape {list(shape)}"
    lacking = numel(shape) - sum([numel(box.sizes) for box in boxes])
    if lacking > 0:
        return f"its {len(boxes)} pieces lack {lacking} of {numel(shape)} elements"
    if _is_grid(shape, boxes):
        return ""
    return _overlap(shape, boxes) or ("its pieces overlap" if lacking else "")


def _is_grid(shape: Shape, boxes: Sequence[Box]) -> bool:
    """True for all cells of one grid: what nearly every writer makes, told in no time."""
    ends = []
    for dim, size in enumerate(shape):
        starts = sorted({box.offsets[dim] for box in boxes})
        ends.append(dict(pairwise([*starts, size])))
    if prod(map(len, ends)) != len(boxes) or len({box.offsets for box in boxes}) != len(boxes):
        return False
    return all(
        at + n == ends[dim][at]
        for box in boxes
        for dim, (at, n) in enumerate(zip(box.offsets, box.sizes, strict=True))
    )


def _overlap(shape: Shape, boxes: Sequence[Box]) -> str:
    """Two boxes that hold the same elements, in words: a sweep along the dimension of most cuts."""
    cuts = [len({box.offsets[dim] for box in boxes}) for dim in range(len(shape))]
    dim = cuts.index(max(cuts)) if cuts else 0
    if not shape:
        return f"{len(boxes)} pieces hold its one element" if len(boxes) > 1 else ""
    open_boxes: list[Box] = []
    left = _COMPARED + _COMPARED_PER_PIECE * len(boxes)
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        start = box.offsets[dim]
        open_boxes = [
            other for other in open_boxes if other.offsets[dim] + other.sizes[dim] > start
        ]
        left -= len(open_boxes)
        if left < 0:
            return f"its {len(boxes)} pieces are cut in too many ways to be compared"
        for other in open_boxes:
            if box.common(other):
                return f"the pieces {other} and {box} overlap"
        open_boxes.append(box)
    return ""


def _boxes_of(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The row-major run [start, stop) as boxes, in order: at most two for each dimension."""
    if not shape:
        yield Box((), ())
        return
    row = numel(shape[1:])
    if not row or start >= stop:
        return
    first, begin = divmod(start, row)
    last, end = divmod(stop, row)
    if first == last:
        yield from _in_row(shape, first, begin, end)
        return
    if begin:
        yield from _in_row(shape, first, begin, row)
        first += 1
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if end:
        yield from _in_row(shape, last, 0, end)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in _boxes_of(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


def _dot(places: Sequence[int], strides: Sequence[int]) -> int:
    return sum(at * stride for at, stride in zip(places, strides, strict=True))
