"""Re-layouts between stored and local tensors: frozen, pure, walked both ways.

``forward`` says what comes out of stored layouts; ``source_shapes`` says, for an export, which
stored shapes a local shape goes back to. Those of one tensor are here; ``combining`` has those
that put several together or cut one up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streamload.core.specs import Shape, numel
from streamload.mapping.layout import Layout, LayoutError, axis_of, is_order


class Transform(Protocol):
    """What all transforms have; they are frozen and hashable, so that plans can remember them."""

    __slots__ = ()

    @property
    def label(self) -> str:
        """One word for reports; empty for the identity."""
        return type(self).__name__.lower()

    @property
    def reduces(self) -> str:
        """``"sum"`` or ``"mean"`` if all sources fall on the same elements, else ``""``."""
        return ""

    def __hash__(self) -> int:  # what is frozen has its own, by its fields
        return object.__hash__(self)

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        """The layout of each target, from each source's; ``targets`` are the shapes wanted.

        Raises:
            LayoutError: the shapes do not fit.
        """

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        """The stored shapes that give ``targets``.

        Raises:
            LayoutError: there is no way back, or sizes are not known.
        """


def one_of(layouts: Sequence[Layout], transform: Transform) -> Layout:
    """The only one of ``layouts``.

    Raises:
        LayoutError: there are several.
    """
    if len(layouts) != 1:
        raise LayoutError(f"{transform.label or 'a plain copy'} takes 1 tensor, not {len(layouts)}")
    return layouts[0]


def check_transform(transform: object, what: str) -> None:
    """Refuse what is no transform where the table is written, not midway in a load."""
    methods = (getattr(transform, name, None) for name in ("forward", "source_shapes"))
    if isinstance(transform, type) or not all(map(callable, methods)):
        shown = transform.__name__ if isinstance(transform, type) else repr(transform)
        raise TypeError(f"{what} is an object like Transpose() or Concat(0, (8, 8)), not {shown}")


def check_counts(transform: Transform, **numbers: int) -> None:
    """Refuse what is no whole number of at least 1."""
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            kind = type(transform).__name__
            raise ValueError(f"{kind}: {name} must be a whole number of at least 1: {value!r}")


def set_sizes(transform: Transform, sizes: Sequence[int] | None) -> None:
    """Keep ``sizes`` as a tuple, since transforms are hashed; refuse what are none."""
    if sizes is None:
        return
    if not sizes or any(size < 0 for size in sizes):
        raise ValueError(f"{type(transform).__name__}: sizes cannot be {list(sizes)}")
    object.__setattr__(transform, "sizes", tuple(sizes))


class Relayout(Transform):
    """One source, one target of as many elements."""

    __slots__ = ()

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        del targets
        return [self._view(one_of(layouts, self))]

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        return list(targets)

    def _view(self, layout: Layout) -> Layout:
        return layout


@dataclass(frozen=True, slots=True)
class Identity(Relayout):
    """The stored tensor as it is."""

    @property
    def label(self) -> str:
        return ""


# What a rule has that names no transform: its author may not have thought of one.
UNSTATED = Identity()


@dataclass(frozen=True, slots=True)
class Transpose(Relayout):
    """Swap two dimensions; by default a matrix, as GPT-2's Conv1D [in, out] to [out, in]."""

    first: int = 0
    second: int = 1

    def _dims(self, count: int) -> list[int]:
        dims = list(range(count))
        if not all(-count <= dim < count for dim in (self.first, self.second)):
            raise LayoutError(f"cannot transpose a tensor of {count} dimensions")
        dims[self.first], dims[self.second] = dims[self.second], dims[self.first]
        return dims

    def _view(self, layout: Layout) -> Layout:
        return layout.permute(self._dims(len(layout.shape)))

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        return [tuple(shape[d] for d in self._dims(len(shape))) for shape in targets]


@dataclass(frozen=True, slots=True)
class Permute(Relayout):
    """Reorder dimensions, as ``torch.Tensor.permute``."""

    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(self.dims))

    def _dims(self, shape: Shape) -> list[int]:
        dims = [axis_of(dim, shape) for dim in self.dims]
        if not is_order(dims, len(shape)):
            raise LayoutError(f"cannot permute shape {list(shape)} by {list(self.dims)}")
        return dims

    def _view(self, layout: Layout) -> Layout:
        return layout.permute(self._dims(layout.shape))

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        orders = [self._dims(shape) for shape in targets]
        return [
            tuple(shape[dims.index(d)] for d in range(len(dims)))
            for shape, dims in zip(targets, orders, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Interleaved(Relayout):
    """Interleaved pairs along ``dim``, of each of ``heads`` by itself, to half-split form.

    Rotary rows [heads * head_dim] as in Meta's LLaMA files:
    ``w.view(heads, head_dim/2, 2, D).transpose(1, 2)``; with one head, rows of gate and up in turn
    become gate | up. ``inverse`` is the other way: halves are stored, pairs come out.
    """

    heads: int = 1
    dim: int = 0
    inverse: bool = False

    def __post_init__(self) -> None:
        check_counts(self, heads=self.heads)

    def _view(self, layout: Layout) -> Layout:
        dim = axis_of(self.dim, layout.shape)
        rows = layout.shape[dim]
        if rows == 0 or rows % (2 * self.heads):
            raise LayoutError(f"cannot view {rows} rows as {self.heads} heads of pairs")
        half = rows // self.heads // 2
        dims = list(range(len(layout.shape) + 2))
        dims[dim + 1], dims[dim + 2] = dim + 2, dim + 1
        pair = (2, half) if self.inverse else (half, 2)
        return layout.unflatten(dim, (self.heads, *pair)).permute(dims).flatten(dim, dim + 2)


@dataclass(frozen=True, slots=True)
class Flatten(Relayout):
    """Dimensions ``first`` to ``last`` (inclusive) as one, as ``torch.Tensor.flatten``.

    ``sizes`` are theirs, which an export needs to go back.
    """

    first: int = 0
    last: int = -1
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        set_sizes(self, self.sizes)

    def _view(self, layout: Layout) -> Layout:
        first, last = (axis_of(dim, layout.shape) for dim in (self.first, self.last))
        found = layout.shape[first : last + 1]
        if not found or (self.sizes is not None and found != self.sizes):
            raise LayoutError(
                f"cannot flatten dimensions {self.first} to {self.last} of {list(layout.shape)}"
                + (f" as {list(self.sizes)}" if self.sizes is not None else "")
            )
        return layout.flatten(first, last)

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        if self.sizes is None:
            raise LayoutError("Flatten needs sizes= to go back")
        found = []
        for shape in targets:
            dim = axis_of(self.first, range(len(shape) + len(self.sizes) - 1))
            if dim >= len(shape) or shape[dim] != numel(self.sizes):
                raise LayoutError(f"cannot view shape {list(shape)} as {list(self.sizes)}")
            found.append((*shape[:dim], *self.sizes, *shape[dim + 1 :]))
        return found


@dataclass(frozen=True, slots=True)
class Unflatten(Relayout):
    """Dimension ``dim`` as the row-major dimensions ``sizes``, as ``torch.Tensor.unflatten``."""

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        set_sizes(self, self.sizes)

    def _view(self, layout: Layout) -> Layout:
        return layout.unflatten(self.dim, self.sizes)

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        found = []
        for shape in targets:
            dim = axis_of(self.dim, range(len(shape) - len(self.sizes) + 1))
            after = dim + len(self.sizes)
            if shape[dim:after] != self.sizes:
                raise LayoutError(f"shape {list(shape)} is not unflattened to {list(self.sizes)}")
            found.append((*shape[:dim], numel(self.sizes), *shape[after:]))
        return found
