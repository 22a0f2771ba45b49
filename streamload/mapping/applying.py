"""A transform carried out on shapes, and what comes of it checked before anything relies on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from streamload.core.specs import Shape, contiguous_strides, numel
from streamload.core.wording import plural
from streamload.mapping.chaining import alike
from streamload.mapping.layout import Layout, LayoutError
from streamload.mapping.transforms import Transform


def apply(
    transform: Transform,
    shapes: Sequence[Shape],
    strides: Sequence[Shape | None],
    wanted: Sequence[Shape | None],
) -> list[Layout]:
    """One layout for each target; safe to make moves of.

    Args:
        transform: between stored and local tensors.
        shapes: of the sources.
        strides: of the sources' memory, in elements; None for row-major.
        wanted: shapes of the targets where they are known.

    Raises:
        LayoutError: the shapes do not fit, there are not as many layouts as targets, or one
            reaches outside a source or its target or does not cover the target exactly once.
    """
    steps = [own or contiguous_strides(s) for s, own in zip(shapes, strides, strict=True)]
    sources = [Layout.whole(i, s, t) for i, (s, t) in enumerate(zip(shapes, steps, strict=True))]
    layouts = list(transform.forward(sources, wanted))
    if len(layouts) != len(wanted):
        label = transform.label or "a plain copy"
        raise LayoutError(f"{label} gives {plural(len(layouts), 'tensor')}, not {len(wanted)}")
    ends = [_reach(s, t) for s, t in zip(shapes, steps, strict=True)]
    for layout in layouts:
        _check_bounds(layout, ends)
        _check_cover(layout, len(shapes) if transform.reduces else 1)
    return layouts


@lru_cache(maxsize=1024)
def _stored_shapes(transform: Transform, targets: tuple[Shape, ...]) -> tuple[Shape, ...]:
    return tuple(transform.source_shapes(targets))


def unfit_parts(
    transform: Transform, shapes: Sequence[Shape], targets: Sequence[Shape]
) -> list[tuple[int, Shape]]:
    """Which of several sources do not fit, and what they should be, where the transform knows."""
    try:
        expected = _stored_shapes(transform, tuple(targets))
    except LayoutError:
        return []
    if len(expected) != len(shapes):
        return []
    pairs = zip(shapes, expected, strict=True)
    return [(at, wanted) for at, (shape, wanted) in enumerate(pairs) if shape != wanted]


def odd_parts(transform: Transform, shapes: Sequence[Shape]) -> list[tuple[int, Shape]]:
    """Which of several stacked sources are not as most of them, and how these are."""
    found: list[tuple[int, Shape]] = []
    for run in alike(transform, len(shapes)):
        ((usual, _),) = Counter(shapes[at] for at in run).most_common(1)
        found += [(at, usual) for at in run if shapes[at] != usual]
    return found


def _reach(shape: Shape, strides: Shape) -> int:
    """Elements from the first one of a source to one past its last."""
    if not numel(shape):
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _check_bounds(layout: Layout, ends: Sequence[int]) -> None:
    for piece in (piece for piece in layout.pieces if piece.count):
        low = piece.offset + sum(min(0, (a.size - 1) * a.stride) for a in piece.axes)
        high = piece.offset + sum(max(0, (a.size - 1) * a.stride) for a in piece.axes)
        if low < 0 or high >= ends[piece.source]:
            raise LayoutError(f"source {piece.source} has no elements {low} to {high}")
        if len(piece.starts) != len(layout.shape):
            raise LayoutError(f"a part is not of the target's {len(layout.shape)} dimensions")
        last = list(piece.starts)
        for axis in piece.axes:
            if axis.size > 1 and (not 0 <= axis.dim < len(last) or axis.step < 1):
                raise LayoutError(f"the target {list(layout.shape)} has no dimension {axis.dim}")
            if axis.size > 1:
                last[axis.dim] += (axis.size - 1) * axis.step
        pairs = zip(piece.starts, last, layout.shape, strict=True)
        if not all(0 <= start <= end < size for start, end, size in pairs):
            raise LayoutError(f"a part reaches outside the target {list(layout.shape)}")


def _check_cover(layout: Layout, covers: int) -> None:
    """Each of ``covers`` sources of a sum covers the target; parts of a copy do it together."""
    counts: Counter[int] = Counter()
    for piece in layout.pieces:
        counts[piece.source if covers > 1 else 0] += piece.count
    needed = numel(layout.shape)
    if needed and (len(counts) != covers or set(counts.values()) != {needed}):
        have = sum(counts.values())
        raise LayoutError(f"{have} elements do not cover the target's {needed * covers}")
