"""Two plans one after the other as one: stored → local → published, without the local tensors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from streamload.core.dtypes import BY_NAME, DType
from streamload.core.specs import StridedCopy, contiguous_strides, numel
from streamload.mapping.layout import LayoutError
from streamload.planning.dtype_rules import DtypeError, target_dtype
from streamload.planning.records import PlannedTensor


def compose(
    first: Mapping[str, PlannedTensor], second: Iterable[PlannedTensor], wanted: DType | None
) -> tuple[list[PlannedTensor], list[str]]:
    """The tensors of ``second``, filled straight from what ``first`` is filled from.

    Args:
        first: tensors by name, contiguous.
        second: tensors whose copies read those of ``first``.
        wanted: the dtype asked for.

    Returns:
        The tensors, and a problem for each that needs more than re-naming, cutting and joining
        of what is stored.
    """
    made: list[PlannedTensor] = []
    problems: list[str] = []
    parts = {name: _Part(tensor) for name, tensor in first.items()}
    for tensor in second:
        try:
            made.append(_composed([parts[name] for name in tensor.sources], tensor, wanted))
        except (LayoutError, DtypeError) as error:
            problems.append(
                f"{tensor.name!r} cannot be written from {', '.join(map(repr, tensor.sources))} "
                f"as stored: {error}; convert to names='local', or load and export"
            )
    return made, problems


class _Part:
    """A tensor that others are cut from; finds which of its copies fill a range of its elements."""

    def __init__(self, planned: PlannedTensor) -> None:
        self.planned = planned

    @cached_property
    def _filled(self) -> list[tuple[int, int, StridedCopy]]:
        """Where each copy begins and ends, in order."""
        shape, strides = self.planned.shape, self.planned.strides
        assert strides == contiguous_strides(shape), "composed plans are contiguous"
        spans = [
            (*_span(c.shape, c.target_strides, c.target_offset), c) for c in self.planned.copies
        ]
        return sorted(spans, key=lambda span: span[0])

    @cached_property
    def _ends(self) -> list[int]:
        """How far each copy and those before it reach."""
        return list(accumulate((high for _, high, _ in self._filled), max))

    def within(self, begin: int, end: int) -> list[tuple[int, int, StridedCopy]]:
        """The copies whose span meets [begin, end)."""
        first = bisect_right(self._ends, begin)
        last = bisect_left(self._filled, end, key=lambda span: span[0])
        return [span for span in self._filled[first:last] if span[1] > begin]


def _composed(
    made_of: Sequence[_Part], tensor: PlannedTensor, wanted: DType | None
) -> PlannedTensor:
    parts = [part.planned for part in made_of]
    whole = parts[0] if len(parts) == 1 and _is_whole(parts[0], tensor) else None
    if whole is not None:
        return replace(whole, name=tensor.name, aliases=())
    summed = next((part for part in parts if part.reduces), None)
    if summed is not None:
        raise LayoutError(f"the {summed.reduces} of its partitions is not cut or re-laid")
    by_name = dict(zip(tensor.sources, made_of, strict=True))
    copies = [made for copy in tensor.copies for made in _through(by_name[copy.stored_name], copy)]
    if sum(numel(copy.shape) for copy in copies) != numel(tensor.shape):
        raise LayoutError("its parts are re-laid twice")
    stored = tuple(BY_NAME[name] for part in parts for name in part.stored_dtype.split("+"))
    return replace(
        tensor,
        sources=tuple(dict.fromkeys(copy.stored_name for copy in copies)),
        copies=tuple(copies),
        dtype=target_dtype(tensor.name, stored, None, wanted).name,
        stored_dtype="+".join(dict.fromkeys(d.name for d in stored)),
        transform="+".join(
            dict.fromkeys(t for t in (*(p.transform for p in parts), tensor.transform) if t)
        ),
    )


def _is_whole(part: PlannedTensor, tensor: PlannedTensor) -> bool:
    """True if the tensor is the part under another name."""
    if part.shape != tensor.shape:
        return False
    if not tensor.copies:
        return numel(tensor.shape) == 0
    (copy, *more) = tensor.copies
    return not more and copy.is_run and copy.source_offset == copy.target_offset == 0


def _through(part: _Part, copy: StridedCopy) -> list[StridedCopy]:
    """The copies that fill what ``copy`` takes out of ``part``, from what ``part`` is made of.

    Raises:
        LayoutError: neither is a plain run where they meet.
    """
    made = []
    begin, end = _span(copy.shape, copy.source_strides, copy.source_offset)
    for low, high, inner in part.within(begin, end):
        if copy.is_run and begin <= low and high <= end:
            made.append(_shifted(inner, copy))
        elif inner.is_run and low <= begin and end <= high:
            offset = copy.source_offset - inner.target_offset + inner.source_offset
            made.append(replace(copy, stored_name=inner.stored_name, source_offset=offset))
        elif inner.is_run and copy.is_run:
            made.append(_overlap(inner, copy, max(low, begin), min(high, end)))
        else:
            raise LayoutError("its parts are re-laid twice")
    return made


def _span(shape: Sequence[int], strides: Sequence[int], offset: int) -> tuple[int, int]:
    """The first element of a strided view and one past its last."""
    return offset, offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1


def _shifted(inner: StridedCopy, copy: StridedCopy) -> StridedCopy:
    offset = inner.target_offset - copy.source_offset + copy.target_offset
    return replace(inner, target_offset=offset)


def _overlap(inner: StridedCopy, copy: StridedCopy, low: int, high: int) -> StridedCopy:
    """Elements [low, high) of the tensor between, of two runs."""
    return StridedCopy(
        inner.stored_name,
        (high - low,),
        (1,),
        inner.source_offset + low - inner.target_offset,
        (1,),
        copy.target_offset + low - copy.source_offset,
    )
