"""What a transform makes of shapes, worked out once for all blocks that have the same ones."""

from __future__ import annotations

from functools import lru_cache

from streamload.core.specs import Shape, StridedCopy, contiguous_strides
from streamload.mapping.applying import apply
from streamload.mapping.layout import Layout, stored_order_strides
from streamload.mapping.transforms import Transform
from streamload.ranks.shards import Shard, part_of

_MOST_KEPT = 4096


class Geometry:
    """One target's layout and what follows from it; names of stored tensors are left open.

    Attributes:
        layout: where the target's elements come from.
        used: numbers of the sources it really takes from.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.used = tuple(sorted({piece.source for piece in layout.pieces}))
        self.contiguous = contiguous_strides(layout.shape)
        self._parts: dict[Shard, Geometry] = {}
        self._copies: dict[Shape, tuple[tuple[int, StridedCopy], ...]] = {}

    def part(self, shard: Shard | None) -> Geometry:
        """Of what a rank holds; of all if nothing is cut.

        Raises:
            LayoutError: the boxes do not lie inside of the target.
        """
        if shard is None:
            return self
        if shard not in self._parts:
            self._parts[shard] = Geometry(part_of(self.layout, shard))
        return self._parts[shard]

    def strides(self, *, stored_order: bool) -> Shape:
        """The target's strides, row-major or in the stored tensor's order of dimensions."""
        found = stored_order_strides(self.layout) if stored_order else None
        return found or self.contiguous

    def copies(self, names: tuple[str, ...], strides: Shape) -> tuple[StridedCopy, ...]:
        """The copies out of the sources called ``names`` into a target of ``strides``."""
        known = self._copies.get(strides)
        if known is None:
            numbers = [str(i) for i in range(len(names))]
            known = tuple((int(m.stored_name), m) for m in self.layout.copies(numbers, strides))
            self._copies[strides] = known
        return tuple([copy.of(names[i]) for i, copy in known])


@lru_cache(maxsize=_MOST_KEPT)
def geometries(
    transform: Transform,
    shapes: tuple[Shape, ...],
    strides: tuple[Shape | None, ...],
    wanted: tuple[Shape | None, ...],
) -> tuple[Geometry, ...]:
    """One Geometry for each target.

    Args:
        transform: between stored and local tensors.
        shapes: of the sources.
        strides: of the sources' memory; None for row-major.
        wanted: shapes of the targets where they are known.

    Raises:
        LayoutError: the shapes do not fit the transform, or it does not cover a target.
    """
    return tuple(Geometry(layout) for layout in apply(transform, shapes, strides, wanted))
