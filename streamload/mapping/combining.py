"""Transforms that put several tensors together or cut one up.

Arithmetic (``Sum``, ``Mean``) has no way back. ``chaining`` does one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from streamload.core.specs import Shape
from streamload.mapping.layout import Layout, LayoutError, axis_of, concat, with_size
from streamload.mapping.transforms import (
    UNSTATED,
    Transform,
    check_counts,
    check_transform,
    one_of,
    set_sizes,
)

_T = TypeVar("_T")


def _listed(shapes: Sequence[Shape]) -> str:
    return " and ".join(str(list(shape)) for shape in dict.fromkeys(shapes))


def _set_each(transform: Transform, each: Sequence[Transform], sizes: Sequence[int] | None) -> None:
    """As a tuple, like sizes; refuse what does more than re-lay a part."""
    kind = type(transform).__name__
    if not isinstance(each, (tuple, list)):
        raise TypeError(f"{kind}: each= is a tuple with a transform for each part, not {each!r}")
    for step in each:
        check_transform(step, f"{kind}: a transform in each=")
    object.__setattr__(transform, "each", tuple(each))
    if any(step.reduces for step in each):
        raise ValueError(f"{kind}: each= may re-lay a part, not add or average")
    if each and sizes is not None and len(each) != len(sizes):
        raise ValueError(f"{kind}: {len(each)} in each=, {len(sizes)} in sizes=")


def _one_shape(shapes: Sequence[Shape], transform: Transform) -> Shape:
    if len(shapes) != 1:
        raise LayoutError(f"{transform.label} gives 1 tensor, not {len(shapes)}")
    return shapes[0]


def _paired(steps: Sequence[Transform], parts: Sequence[_T]) -> list[tuple[Transform, _T]]:
    """A step for each part; there may be none at all."""
    if steps and len(steps) != len(parts):
        raise LayoutError(f"each= is for {len(steps)} parts, not {len(parts)}")
    return list(zip(steps or [UNSTATED] * len(parts), parts, strict=True))


def _each(steps: Sequence[Transform], parts: Sequence[Layout]) -> list[Layout]:
    return [out for step, one in _paired(steps, parts) for out in step.forward([one], [None])]


def _each_back(steps: Sequence[Transform], shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes that parts had before ``_each``."""
    return [back for step, one in _paired(steps, shapes) for back in step.source_shapes([one])]


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
        set_sizes(self, self.sizes)
        _set_each(self, self.each, self.sizes)

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        del targets
        return [concat(_each(self.each, layouts), self.dim)]

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        if self.sizes is None:
            raise LayoutError("Concat needs sizes= to go back")
        shape = _one_shape(targets, self)
        dim = axis_of(self.dim, shape)
        if shape[dim] != sum(self.sizes):
            raise LayoutError(f"cannot cut shape {list(shape)} into {list(self.sizes)}")
        return _each_back(self.each, [with_size(shape, dim, size) for size in self.sizes])


@dataclass(frozen=True, slots=True)
class Split(Transform):
    """One source cut along ``dim`` into several targets.

    ``sizes`` default to the targets' own sizes, or equal parts where those are not known. ``each``
    is applied to the parts one by one afterwards.
    """

    dim: int = 0
    sizes: tuple[int, ...] | None = None
    each: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        set_sizes(self, self.sizes)
        _set_each(self, self.each, self.sizes)

    def _sizes(self, shape: Shape, dim: int, targets: Sequence[Shape | None]) -> Sequence[int]:
        if self.sizes is not None:
            return self.sizes
        total = shape[dim]
        parts = [s for s in targets if s is not None]
        if len(parts) == len(targets):
            parts = _each_back(self.each, parts)
        known = [s[dim] for s in parts if len(s) == len(shape)]
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
        parts = [layout.narrow(dim, at, size) for at, size in zip(starts, sizes, strict=False)]
        return _each(self.each, parts)

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        parts = _each_back(self.each, targets)
        first = parts[0]
        dim = axis_of(self.dim, first)
        if any(
            len(shape) != len(first) or with_size(shape, dim, first[dim]) != first
            for shape in parts
        ):
            raise LayoutError(f"{_listed(parts)} are not parts of one tensor")
        sizes = tuple(shape[dim] for shape in parts)
        if self.sizes is not None and self.sizes != sizes:
            raise LayoutError(f"the parts are {list(sizes)} rows, not {list(self.sizes)}")
        return [with_size(first, dim, sum(sizes))]


@dataclass(frozen=True, slots=True)
class Stack(Transform):
    """Sources of one shape, one for each place of a new dimension ``dim``, as ``torch.stack``.

    Where ``{expert}`` stands in a rule's sources, its experts are stacked, in the order of their
    numbers; else the rule's sources are.
    """

    dim: int = 0

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        del targets
        if not layouts:
            raise LayoutError("there is nothing to stack")
        if any(layout.shape != layouts[0].shape for layout in layouts):
            raise LayoutError(f"cannot stack {_listed([layout.shape for layout in layouts])}")
        count = len(layouts[0].shape)
        dims: list[int | None] = list(range(count))
        dims.insert(axis_of(self.dim, range(count + 1)), None)
        return [concat([layout.rearrange(dims) for layout in layouts], dims.index(None))]

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        shape = _one_shape(targets, self)
        dim = axis_of(self.dim, shape)
        if not shape[dim]:
            raise LayoutError(f"shape {list(shape)} is a stack of nothing")
        return [(*shape[:dim], *shape[dim + 1 :])] * shape[dim]


@dataclass(frozen=True, slots=True)
class Unstack(Transform):
    """One source cut into as many targets as dimension ``dim`` is long, as ``torch.unbind``.

    Where ``{expert}`` stands in a rule's targets, they are its experts, in the order of their
    numbers; else they are the rule's targets.
    """

    dim: int = 0

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        layout = one_of(layouts, self)
        dim = axis_of(self.dim, layout.shape)
        if layout.shape[dim] != len(targets):  # before a damaged size is walked through
            raise LayoutError(f"cannot unstack {layout.shape[dim]} into {len(targets)} tensors")
        dims = [d for d in range(len(layout.shape)) if d != dim]
        return [layout.narrow(dim, at, 1).rearrange(dims) for at in range(layout.shape[dim])]

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        first = targets[0]
        if any(shape != first for shape in targets):
            raise LayoutError(f"{_listed(targets)} are not of one shape")
        dim = axis_of(self.dim, range(len(first) + 1))
        return [(*first[:dim], len(targets), *first[dim:])]


@dataclass(frozen=True, slots=True)
class HeadSplit(Transform):
    """GPT-NeoX's fused rows ``[head][part][head_dim]`` cut into ``parts`` targets (q, k, v)."""

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


class Reduction(Transform):
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
class Sum(Reduction):
    """The sum of all sources, as above (row-parallel biases of raw partitions)."""


@dataclass(frozen=True, slots=True)
class Mean(Reduction):
    """The mean of sources that must agree: their sum, as above, over their number.

    ``tolerance`` bounds the sum of squared differences (GPT-NeoX's helpers: 1e-4). All of a value
    is compared: the imaginary part, every bit of an integer. Integers that disagree and are
    averaged all the same (``replicas="average"``) must have a whole mean.
    """

    tolerance: float = 1e-4
