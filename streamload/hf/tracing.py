"""What torch code does to tensors, read as places: its views and joins become Layouts.

Code that only re-lays tensors (``cat``, ``stack``, ``chunk``, ``transpose``, ``reshape``, ...) is
run on stand-ins that have a shape and a Layout but no values. What comes out says where each
element comes from. Code that computes has no places, and says so at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from streamload.core.specs import Shape, contiguous_strides, numel
from streamload.mapping.layout import Axis, Layout, LayoutError, Piece, concat
from streamload.mapping.transforms import Transform

_aten: Any = torch.ops.aten


class NoPlaceError(Exception):
    """The code does more than re-lay: its results are no views of what is stored."""


@dataclass(frozen=True, slots=True)
class Places(Transform):
    """A re-layout that is known by its result: one Layout for each target.

    Attributes:
        layouts: of the targets, made for sources of known shapes and strides.
        words: what reports call it.
    """

    layouts: tuple[Layout, ...]
    words: str

    @property
    def label(self) -> str:
        return self.words

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        del layouts, targets
        return list(self.layouts)

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        del targets
        raise LayoutError(f"{self.words} is known one way only")


class Traced(torch.Tensor):
    """A tensor without values that knows where each of its elements comes from."""

    layout_of: Layout
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, layout: Layout, dtype: torch.dtype) -> Traced:
        # Always contiguous to torch: how elements really lie is the Layout's business.
        made: Traced = torch.Tensor._make_wrapper_subclass(cls, layout.shape, dtype=dtype)
        made.layout_of = layout
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do to the Layouts what torch does to tensors.

        Raises:
            NoPlaceError: an operation that computes, or one that is not known.
        """
        del types
        rule = _RULES.get(func)
        if rule is None:
            raise NoPlaceError(f"{func} is no re-layout")
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        try:
            made = rule(*args, **(kwargs or {}))
        except LayoutError as error:
            # Shapes that do not fit are torch's own error; with those that do, it is ours.
            func(*tree_map(_on_meta, args), **(kwargs or {}))
            raise NoPlaceError(str(error)) from error
        if isinstance(made, Layout):
            return cls(made, first.dtype)
        return [cls(layout, first.dtype) for layout in made]


def _on_meta(value: Any) -> Any:
    is_traced = isinstance(value, Traced)
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_traced else value


def _layout(value: object) -> Layout:
    if not isinstance(value, Traced):
        raise NoPlaceError("values of its own are mixed in")
    return value.layout_of


def _same(tensor: Traced, **_: object) -> Layout:
    return _layout(tensor)


def _view(tensor: Traced, size: Sequence[int]) -> Layout:
    layout = _layout(tensor)
    sizes = list(size)
    if -1 in sizes:
        known = numel(tuple(n for n in sizes if n != -1))
        sizes[sizes.index(-1)] = numel(layout.shape) // known if known else 0
    return refold(layout, tuple(sizes))


def _permute(tensor: Traced, dims: Sequence[int]) -> Layout:
    count = len(tensor.shape)
    return _layout(tensor).permute([dim % count for dim in dims])


def _transpose(tensor: Traced, first: int, second: int) -> Layout:
    dims = list(range(len(tensor.shape)))
    dims[first], dims[second] = dims[second], dims[first]
    return _layout(tensor).permute(dims)


def _turn(tensor: Traced) -> Layout:
    return _transpose(tensor, 0, 1) if len(tensor.shape) > 1 else _layout(tensor)


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Layout:
    return concat([_layout(t) for t in tensors], dim)


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Layout:
    return concat([_unsqueeze(t, dim) for t in tensors], dim)


def _cut(layout: Layout, dim: int, sizes: Sequence[int]) -> list[Layout]:
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return [layout.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def _split(tensor: Traced, size: int, dim: int = 0) -> list[Layout]:
    total = tensor.shape[dim]
    sizes = [min(size, total - start) for start in range(0, total, size)]
    return _cut(_layout(tensor), dim, sizes)


def _split_sizes(tensor: Traced, sizes: Sequence[int], dim: int = 0) -> list[Layout]:
    return _cut(_layout(tensor), dim, sizes)


def _slice(
    tensor: Traced,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Layout:
    first, last, by = slice(start, end, step).indices(tensor.shape[dim])
    if by != 1:
        raise NoPlaceError("every so many rows are taken")
    return _layout(tensor).narrow(dim, first, max(last - first, 0))


def _select(tensor: Traced, dim: int, index: int) -> Layout:
    one = _layout(tensor).narrow(dim, index % tensor.shape[dim], 1)
    return _without(one, dim % len(one.shape))


def _unbind(tensor: Traced, dim: int = 0) -> list[Layout]:
    return [_select(tensor, dim, at) for at in range(tensor.shape[dim])]


def _unsqueeze(tensor: Traced, dim: int) -> Layout:
    layout = _layout(tensor)
    at = dim % (len(layout.shape) + 1)
    pieces = tuple(
        replace(
            p,
            starts=(*p.starts[:at], 0, *p.starts[at:]),
            axes=tuple(replace(a, dim=a.dim + (a.dim >= at)) for a in p.axes),
        )
        for p in layout.pieces
    )
    return Layout((*layout.shape[:at], 1, *layout.shape[at:]), pieces)


def _squeeze(tensor: Traced, dim: int | Sequence[int] | None = None) -> Layout:
    layout = _layout(tensor)
    count = len(layout.shape)
    dims = range(count) if dim is None else [dim] if isinstance(dim, int) else dim
    for at in sorted((d % count for d in dims), reverse=True):
        if layout.shape[at] == 1:
            layout = _without(layout, at)
    return layout


def _without(layout: Layout, dim: int) -> Layout:
    """Without dimension ``dim``, which is of size 1."""
    pieces = tuple(
        replace(
            p,
            starts=(*p.starts[:dim], *p.starts[dim + 1 :]),
            axes=tuple(replace(a, dim=a.dim - (a.dim > dim)) for a in p.axes if a.dim != dim),
        )
        for p in layout.pieces
    )
    return Layout((*layout.shape[:dim], *layout.shape[dim + 1 :]), pieces)


def _index(tensor: Traced, indices: Sequence[torch.Tensor | None]) -> Layout:
    """Rows picked one by one along a single dimension: ``tensor[:, [0, 3]]``."""
    picked = [(dim, rows) for dim, rows in enumerate(indices) if rows is not None]
    if len(picked) != 1 or picked[0][1].ndim != 1 or picked[0][1].dtype != torch.int64:
        raise NoPlaceError("elements are picked one by one")
    dim, rows = picked[0]
    layout = _layout(tensor)
    return concat([layout.narrow(dim, row % layout.shape[dim], 1) for row in rows.tolist()], dim)


_RULES: dict[Any, Callable[..., Layout | list[Layout]]] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.reshape.default: _view,
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _turn,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_sizes,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.default: _squeeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    _aten.index.Tensor: _index,
}


def refold(layout: Layout, shape: Shape) -> Layout:
    """The same elements in row-major order, under another shape of as many.

    Raises:
        LayoutError: another number of elements, or parts that no such axes describe.
    """
    if layout.shape == shape:
        return layout
    if numel(layout.shape) != numel(shape):
        raise LayoutError(f"cannot view shape {list(layout.shape)} as {list(shape)}")
    if not numel(shape):
        return Layout(shape, ())
    old, new = contiguous_strides(layout.shape), contiguous_strides(shape)
    return Layout(shape, tuple(_refolded(piece, old, shape, new) for piece in layout.pieces))


def _refolded(piece: Piece, old: Shape, shape: Shape, new: Shape) -> Piece:
    rest = sum(start * weight for start, weight in zip(piece.starts, old, strict=True))
    starts = []
    for weight in new:
        starts.append(rest // weight)
        rest %= weight
    axes: list[Axis] = []
    last = list(starts)
    for axis in piece.axes:
        size, stride, step = axis.size, axis.stride, axis.step * old[axis.dim]
        while size > 1:
            dim = next(d for d in range(len(shape)) if new[d] <= step and shape[d] > 1)
            by, left = divmod(step, new[dim])
            fits = size if starts[dim] + (size - 1) * by < shape[dim] else shape[dim] // by
            if left or fits < 2 or size % fits or (fits < size and shape[dim] % by):
                raise LayoutError(f"cannot view parts of {size} rows as {list(shape)}")
            axes.append(Axis(fits, stride, dim, by))
            last[dim] += (fits - 1) * by
            size, stride, step = size // fits, stride * fits, step * fits
    if any(end >= size for end, size in zip(last, shape, strict=True)):
        raise LayoutError(f"parts of the rows reach over an edge of {list(shape)}")
    return replace(piece, starts=tuple(starts), axes=tuple(axes))
