"""Where the elements of one target come from: strided pieces of stored tensors, as pure numbers.

A transform never makes a tensor. It rearranges Layouts while planning; what comes out is turned
into StridedCopies (pairs of strided views), which the engine carries out and an export walks
backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from streamload.core.specs import Shape, StridedCopy, contiguous_strides, numel


class LayoutError(ValueError):
    """Shapes do not fit a transform; planning turns it into a problem of the plan."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a piece: ``size`` steps of ``stride`` stored elements, each moving ``step``
    places along the target's dimension ``dim``.
    """

    size: int
    stride: int
    dim: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A strided part of stored tensor number ``source`` and the place of its first element."""

    source: int
    offset: int
    starts: Shape
    axes: tuple[Axis, ...]

    @property
    def count(self) -> int:
        return numel(tuple(axis.size for axis in self.axes))


@dataclass(frozen=True, slots=True)
class Layout:
    """A target of ``shape``, covered by ``pieces`` without overlap."""

    shape: Shape
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, source: int, shape: Shape, strides: Shape | None = None) -> Layout:
        """The stored tensor itself; ``strides`` in elements of its memory order."""
        steps = strides or contiguous_strides(shape)
        axes = tuple(Axis(n, s, d) for d, (n, s) in enumerate(zip(shape, steps, strict=True)))
        return cls(shape, (Piece(source, 0, (0,) * len(shape), axes),))

    def permute(self, dims: Sequence[int]) -> Layout:
        """Target dimension ``i`` becomes what ``dims[i]`` was."""
        if not is_order(dims, len(self.shape)):
            raise LayoutError(f"cannot permute shape {list(self.shape)} by {list(dims)}")
        return self.rearrange(dims)

    def rearrange(self, dims: Sequence[int | None]) -> Layout:
        """As ``permute``; None is a new dimension of size 1, those left out must be of size 1."""
        place = {old: new for new, old in enumerate(dims)}
        pieces = tuple(
            replace(
                p,
                starts=tuple(0 if d is None else p.starts[d] for d in dims),
                axes=tuple(replace(a, dim=place[a.dim]) for a in p.axes if a.dim in place),
            )
            for p in self.pieces
        )
        return Layout(tuple(1 if d is None else self.shape[d] for d in dims), pieces)

    def narrow(self, dim: int, start: int, length: int) -> Layout:
        """Only ``length`` places from ``start`` along ``dim``."""
        dim = axis_of(dim, self.shape)
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise LayoutError(
                f"rows {start} to {start + length} are outside shape {list(self.shape)}"
            )
        kept = [p for piece in self.pieces for p in _narrow(piece, dim, start, length)]
        return Layout(with_size(self.shape, dim, length), tuple(kept))

    def unflatten(self, dim: int, sizes: Shape) -> Layout:
        """Dimension ``dim`` becomes the row-major dimensions ``sizes``."""
        dim = axis_of(dim, self.shape)
        if numel(sizes) != self.shape[dim]:
            raise LayoutError(f"cannot view size {self.shape[dim]} as {list(sizes)}")
        pieces = self.pieces
        for at in range(len(sizes) - 1):
            inner = numel(sizes[at + 1 :])
            pieces = tuple(_split_piece(p, dim + at, inner) for p in pieces)
        return Layout((*self.shape[:dim], *sizes, *self.shape[dim + 1 :]), pieces)

    def flatten(self, first: int, last: int) -> Layout:
        """Dimensions ``first`` to ``last`` (inclusive) become one."""
        sizes = self.shape[first : last + 1]
        weights = contiguous_strides(sizes)
        pieces = []
        for p in self.pieces:
            start = sum(s * w for s, w in zip(p.starts[first : last + 1], weights, strict=True))
            axes = tuple(_flat_axis(a, first, last, weights) for a in p.axes)
            starts = (*p.starts[:first], start, *p.starts[last + 1 :])
            pieces.append(replace(p, starts=starts, axes=axes))
        shape = (*self.shape[:first], numel(sizes), *self.shape[last + 1 :])
        return Layout(shape, tuple(pieces))

    def copies(self, names: Sequence[str], strides: Shape | None = None) -> tuple[StridedCopy, ...]:
        """One StridedCopy for each piece, coalesced; ``strides`` are the target's, in elements."""
        steps = strides or contiguous_strides(self.shape)
        return tuple(_move(p, names[p.source], steps) for p in self.pieces if p.count)

    def source_strides(self) -> tuple[int, Shape] | None:
        """Offset and strides by which the target is one view of one stored tensor, or None."""
        if len(self.pieces) != 1 or any(self.pieces[0].starts):
            return None
        piece = self.pieces[0]
        strides = [0] * len(self.shape)
        for dim in range(len(self.shape)):
            axes = sorted(
                (a for a in piece.axes if a.dim == dim and a.size > 1), key=lambda a: -a.step
            )
            for outer, inner in pairwise(axes):
                if outer.stride != inner.stride * inner.size:
                    return None
            strides[dim] = axes[-1].stride if axes else 1
        return piece.offset, tuple(strides)


def axis_of(dim: int, shape: Sequence[int]) -> int:
    """``dim``, or what a negative one counts to from the end, as in torch.

    Raises:
        LayoutError: the shape has no such dimension.
    """
    if not -len(shape) <= dim < len(shape):
        raise LayoutError(f"a tensor of {len(shape)} dimensions has no dimension {dim}")
    return dim % len(shape)


def is_order(dims: Sequence[int], count: int) -> bool:
    """True if ``dims`` name each of ``count`` dimensions once, none of them from the end."""
    return sorted(dims) == list(range(count))


def concat(layouts: Sequence[Layout], dim: int) -> Layout:
    """All ``layouts`` behind each other along ``dim``."""
    if not layouts:
        raise LayoutError("there is nothing to concatenate")
    first = layouts[0].shape
    dim = axis_of(dim, first)
    pieces: list[Piece] = []
    position = 0
    for layout in layouts:
        same = len(layout.shape) == len(first) and all(
            a == b or i == dim for i, (a, b) in enumerate(zip(layout.shape, first, strict=True))
        )
        if not same:
            shapes = " + ".join(str(list(part.shape)) for part in layouts)
            raise LayoutError(f"cannot concatenate {shapes} along dimension {dim}")
        pieces.extend(
            replace(p, starts=with_size(p.starts, dim, p.starts[dim] + position))
            for p in layout.pieces
        )
        position += layout.shape[dim]
    return Layout(with_size(first, dim, position), tuple(pieces))


def stored_order_strides(layout: Layout) -> Shape | None:
    """Dense target strides that keep the stored tensor's own order of dimensions, or None."""
    view = layout.source_strides()
    if view is None:
        return None
    order = sorted(
        range(len(layout.shape)), key=lambda d: -view[1][d] if layout.shape[d] > 1 else 0
    )
    strides, step = [1] * len(layout.shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(layout.shape[dim], 1)
    return tuple(strides)


def with_size(values: Shape, index: int, value: int) -> Shape:
    """``values`` with another one at ``index``."""
    return (*values[:index], value, *values[index + 1 :])


def _narrow(piece: Piece, dim: int, start: int, length: int) -> Iterator[Piece]:
    """The parts of ``piece`` inside the range: one, or several where rows are interleaved."""
    nest = sorted((a for a in piece.axes if a.dim == dim and a.size > 1), key=lambda a: -a.step)
    rest = tuple([a for a in piece.axes if a.dim != dim or a.size == 1])
    for offset, begin, axes in _within(nest, piece.starts[dim], start, start + length):
        starts = with_size(piece.starts, dim, begin - start)
        yield Piece(piece.source, piece.offset + offset, starts, (*axes, *rest))


def _within(
    nest: Sequence[Axis], begin: int, low: int, high: int
) -> Iterator[tuple[int, int, tuple[Axis, ...]]]:
    """The places of nested axes along one dimension that lie in [low, high).

    ``nest`` has the widest step first, and begins at place ``begin``. What comes is the stored
    elements to skip, the first place, and the axes from there.
    """
    if not nest:
        if low <= begin < high:
            yield 0, begin, ()
        return
    outer, inner = nest[0], nest[1:]
    reach = sum((a.size - 1) * a.step for a in inner)
    # Rounds of the outer axis that touch the range, and of these the ones that lie inside of it.
    touched = range(
        max(-(-(low - reach - begin) // outer.step), 0),
        min((high - 1 - begin) // outer.step + 1, outer.size),
    )
    first = max(-(-(low - begin) // outer.step), 0)
    last = min((high - 1 - reach - begin) // outer.step + 1, outer.size)
    if first < last:
        axes = (replace(outer, size=last - first), *inner)
        yield first * outer.stride, begin + first * outer.step, axes
    for at in touched:
        if not first <= at < last:
            skip, place = at * outer.stride, begin + at * outer.step
            for offset, found, axes in _within(inner, place, low, high):
                yield skip + offset, found, axes


def _split_piece(piece: Piece, dim: int, inner: int) -> Piece:
    """Dimension ``dim`` becomes (outer, ``inner``); later dimensions move up by one."""
    outer_start, inner_start = divmod(piece.starts[dim], inner)
    axes: list[Axis] = []
    for a in piece.axes:
        if a.dim > dim:
            axes.append(replace(a, dim=a.dim + 1))
        elif a.dim < dim:
            axes.append(a)
        elif a.step % inner == 0:
            axes.append(replace(a, step=a.step // inner))
        elif inner_start + (a.size - 1) * a.step < inner:
            axes.append(replace(a, dim=dim + 1))
        elif a.step == 1 and inner_start == 0 and a.size % inner == 0:
            axes.append(Axis(a.size // inner, a.stride * inner, dim))
            axes.append(Axis(inner, a.stride, dim + 1))
        else:
            raise LayoutError(f"cannot cut {a.size} rows into groups of {inner}")
    starts = (*piece.starts[:dim], outer_start, inner_start, *piece.starts[dim + 1 :])
    return replace(piece, starts=starts, axes=tuple(axes))


def _flat_axis(axis: Axis, first: int, last: int, weights: Shape) -> Axis:
    if axis.dim < first:
        return axis
    if axis.dim > last:
        return replace(axis, dim=axis.dim - (last - first))
    return replace(axis, dim=first, step=axis.step * weights[axis.dim - first])


def _move(piece: Piece, name: str, target_strides: Shape) -> StridedCopy:
    start = sum(s * t for s, t in zip(piece.starts, target_strides, strict=True))
    axes = [(a.size, a.stride, a.step * target_strides[a.dim]) for a in piece.axes]
    return coalesced(name, axes, piece.offset, start)


def coalesced(
    name: str, axes: Sequence[tuple[int, int, int]], source_offset: int, target_offset: int
) -> StridedCopy:
    """A StridedCopy of as few axes as can be, in the source's order of memory.

    Args:
        name: of the stored tensor.
        axes: (size, source stride, target stride).
        source_offset: of the first element.
        target_offset: of the first element.
    """
    merged: list[tuple[int, int, int]] = []
    for size, source, target in sorted((a for a in axes if a[0] != 1), key=lambda a: -a[1]):
        if merged:
            outer = merged[-1]
            if outer[1] == source * size and outer[2] == target * size:
                merged[-1] = (outer[0] * size, source, target)
                continue
        merged.append((size, source, target))
    shape, sources, targets = (
        tuple(column) for column in zip(*(merged or [(1, 1, 1)]), strict=True)
    )
    return StridedCopy(name, shape, sources, source_offset, targets, target_offset)


def inverse(copy: StridedCopy, name: str) -> StridedCopy:
    """The same elements moved the other way, out of the tensor called ``name``."""
    axes = list(zip(copy.shape, copy.target_strides, copy.source_strides, strict=True))
    return coalesced(name, axes, copy.target_offset, copy.source_offset)
