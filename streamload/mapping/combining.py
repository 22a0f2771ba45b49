"""Transforms that put several tensors together, cut one up, or do one after another.

Arithmetic (``Sum``, ``Mean``) has no way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from streamload.core.specs import Shape
from streamload.mapping.layout import Layout, LayoutError, axis_of, concat, with_size
from streamload.mapping.transforms import Relayout, Transform, check_counts, one_of


def _set_sizes(transform: Transform, sizes: Sequence[int] | None) -> None:
    """As a tuple, since transforms are hashed."""
    if sizes is None:
        return
    if not sizes or any(size < 0 for size in sizes):
        raise ValueError(f"{type(transform).__name__}: sizes cannot be {list(sizes)}")
    object.__setattr__(transform, "sizes", tuple(sizes))


def _listed(shapes: Sequence[Shape]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)


@dataclass(frozen=True, slots=True)
class Concat(Transform):
    """Several sources behind each other along ``dim`` (q | k | v, gate | up, partitions).

    ``sizes`` are the parts' sizes along ``dim``; they name the part that does not fit and are
    what an export cuts by. ``each`` is applied to the sources one by one first.
    """

    dim: int = 0
    sizes: tuple[int, ...] | None = None
    each: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        _set_sizes(self, self.sizes)
        object.__setattr__(self, "each", tuple(self.each))
        if any(step.reduces for step in self.each):
            raise ValueError("Concat: each= may re-lay a part, not add or average")
        if self.each and self.sizes is not None and len(self.each) != len(self.sizes):
            raise ValueError(f"Concat: {len(self.each)} in each=, {len(self.sizes)} in sizes=")

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        del targets
        parts = list(layouts)
        if self.each:
            if len(self.each) != len(parts):
                raise LayoutError(f"each= is for {len(self.each)} parts, not {len(parts)}")
            pairs = zip(self.each, layouts, strict=True)
            parts = [part for step, one in pairs for part in step.forward([one], [None])]
        return [concat(parts, self.dim)]

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        if self.sizes is None:
            raise LayoutError("Concat needs sizes= to go back")
        if len(targets) != 1:
            raise LayoutError(f"concat gives 1 tensor, not {len(targets)}")
        (shape,) = targets
        dim = axis_of(self.dim, shape)
        if shape[dim] != sum(self.sizes):
            raise LayoutError(f"cannot cut shape {list(shape)} into {list(self.sizes)}")
        parts = [with_size(shape, dim, size) for size in self.sizes]
        if not self.each:
            return parts
        pairs = zip(self.each, parts, strict=True)
        return [back for step, part in pairs for back in step.source_shapes([part])]


@dataclass(frozen=True, slots=True)
class Split(Transform):
    """One source cut along ``dim`` into several targets.

    ``sizes`` default to the targets' own sizes, or equal parts where those are not known.
    """

    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _set_sizes(self, self.sizes)

    def _sizes(self, shape: Shape, dim: int, targets: Sequence[Shape | None]) -> Sequence[int]:
        if self.sizes is not None:
            return self.sizes
        total = shape[dim]
        known = [s[dim] for s in targets if s is not None and len(s) == len(shape)]
        if len(known) == len(targets) and sum(known) == total:
            return known
        if total % len(targets):
            raise LayoutError(f"cannot split {total} rows into {len(targets)} equal parts")
        return [total // len(targets)] * len(targets)

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        layout = one_of(layouts, self)
        dim = axis_of(self.dim, layout.shape)
        sizes = self._sizes(layout.shape, dim, targets)
        if sum(sizes) != layout.shape[dim]:
            raise LayoutError(f"cannot split {layout.shape[dim]} rows into {list(sizes)}")
        starts = accumulate(sizes, initial=0)
        return [layout.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        first = targets[0]
        dim = axis_of(self.dim, first)
        if any(
            len(shape) != len(first) or with_size(shape, dim, first[dim]) != first
            for shape in targets
        ):
            raise LayoutError(f"{_listed(targets)} are not parts of one tensor")
        sizes = tuple(shape[dim] for shape in targets)
        if self.sizes is not None and self.sizes != sizes:
            raise LayoutError(f"the parts are {list(sizes)} rows, not {list(self.sizes)}")
        return [with_size(first, dim, sum(sizes))]


@dataclass(frozen=True, slots=True)
class HeadSplit(Transform):
    """GPT-NeoX's fused rows [head][part][head_dim] cut into ``parts`` targets (q, k, v)."""

    heads: int
    parts: int = 3

    def __post_init__(self) -> None:
        check_counts(self, heads=self.heads, parts=self.parts)

    @property
    def label(self) -> str:
        return "head-split"

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        """One source, ``parts`` targets of [heads * head_dim, ...]."""
        del targets
        layout = one_of(layouts, self)
        rows = layout.shape[0] if layout.shape else 0
        if rows == 0 or rows % (self.heads * self.parts):
            raise LayoutError(f"cannot split {rows} rows into {self.heads} heads of {self.parts}")
        size = rows // (self.heads * self.parts)
        cut = layout.unflatten(0, (self.heads, self.parts, size))
        return [cut.narrow(1, part, 1).flatten(0, 2) for part in range(self.parts)]

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        first = targets[0]
        if len(targets) != self.parts or not first or any(shape != first for shape in targets):
            raise LayoutError(f"{_listed(targets)} are not {self.parts} equal parts")
        return [(first[0] * self.parts, *first[1:])]


class _Reduction(Transform):
    """Every source on the same elements of one target.

    Arithmetic never narrows. Values of 8 or 16 bits and float32 are added up in float32, float64
    in float64, complex ones in complex of their width, one source after the other, and the result
    is cast once. A result that is infinite though no source is counts as an overflow
    (``overflow``). Sums of integers are exact, and refused where they do not fit; booleans are
    refused.
    """

    __slots__ = ()

    @property
    def reduces(self) -> str:
        return type(self).__name__.lower()

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        del targets
        first = layouts[0]
        if any(layout.shape != first.shape for layout in layouts):
            shapes = _listed([layout.shape for layout in layouts])
            raise LayoutError(f"cannot take the {self.label} of {shapes}")
        return [Layout(first.shape, tuple(p for layout in layouts for p in layout.pieces))]

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        del targets
        raise LayoutError(f"a {self.label} of partitions has no way back")


@dataclass(frozen=True, slots=True)
class Sum(_Reduction):
    """The sum of all sources, as above (row-parallel biases of raw partitions)."""


@dataclass(frozen=True, slots=True)
class Mean(_Reduction):
    """The mean of sources that must agree: their sum, as above, over their number.

    ``tolerance`` bounds the sum of squared differences (GPT-NeoX's helpers: 1e-4). All of a value
    is compared: the imaginary part, every bit of an integer. Integers that disagree and are
    averaged all the same (``replicas="average"``) must have a whole mean.
    """

    tolerance: float = 1e-4


_MERGES = (Concat, _Reduction)
_CUTS = (Split, HeadSplit)


def _is_relayout(step: Transform) -> bool:
    if isinstance(step, Chain):
        return all(map(_is_relayout, step.steps))
    return isinstance(step, Relayout)


@dataclass(frozen=True, slots=True)
class Chain(Transform):
    """One transform after another: ``Chain(Transpose(), Split(dim=0))``."""

    steps: tuple[Transform, ...]

    def __init__(self, *steps: Transform) -> None:
        if not steps:
            raise ValueError("a Chain needs at least one step")
        if any(step.reduces for step in steps[1:]):
            raise ValueError("Chain: Sum and Mean must be the first step")
        if steps[0].reduces and not all(map(_is_relayout, steps[1:])):
            raise ValueError("Chain: after Sum or Mean only re-layouts of one tensor may come")
        object.__setattr__(self, "steps", steps)

    @property
    def label(self) -> str:
        return "+".join(step.label for step in self.steps if step.label)

    @property
    def reduces(self) -> str:
        return next((step.reduces for step in self.steps if step.reduces), "")

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        """All steps in order; only the last one sees the targets' shapes.

        A step that takes one tensor is applied to each of several.
        """
        current = list(layouts)
        for step in self.steps[:-1]:
            many = isinstance(step, _MERGES) or len(current) == 1
            current = (
                step.forward(current, [None])
                if many
                else [out for one in current for out in step.forward([one], [None])]
            )
        last = self.steps[-1]
        if isinstance(last, (*_MERGES, *_CUTS)) or len(current) == 1:
            return last.forward(current, targets)
        return [out for one in current for out in last.forward([one], [None])]

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        shapes = list(targets)
        for step in reversed(self.steps):
            if len(shapes) > 1 and not isinstance(step, _CUTS):
                shapes = [out for one in shapes for out in step.source_shapes([one])]
            else:
                shapes = step.source_shapes(shapes)
        return shapes
