"""Compares two checkpoints tensor by tensor, in bounded memory, under their mapped names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import CheckpointError
from streamload.core.options import Settings
from streamload.core.specs import Shape, StridedCopy, numel
from streamload.engine.execute import execute
from streamload.engine.lanes.cpu import CpuLane
from streamload.engine.output_chunks import OutputChunk, batches
from streamload.loading.configuration import config_of, find_config
from streamload.mapping.choose import choose_mapper
from streamload.mapping.rules import NameMap
from streamload.planning import Plan, PlannedTensor, build_plan
from streamload.planning.explaining import listed
from streamload.sources.base import Source

__all__ = ["Comparison", "Difference", "compare_checkpoints"]

Progress = Callable[[int, int, str], object]
_SLAB_BYTES = 16 << 20  # where values differ, both sides are widened to float64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """How one tensor differs.

    Attributes:
        name: as mapped; ``sources`` and ``others`` are the stored names on both sides.
        kind: ``"shape"``, ``"dtype"`` or ``"values"``.
        detail: one readable line.
        elements: how many differ; ``first`` is the index of the first.
        largest: the largest difference of finite values; None where there is none.
    """

    name: str
    sources: tuple[str, ...]
    others: tuple[str, ...]
    kind: str
    detail: str
    elements: int = 0
    first: Shape = ()
    largest: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "name": self.name,
            "sources": list(self.sources),
            "others": list(self.others),
            "kind": self.kind,
            "detail": self.detail,
            "elements": self.elements,
            "first": list(self.first),
            "largest": self.largest,
        }


@dataclass
class Comparison:
    """What came of a comparison; ``only_here`` and ``only_there`` are mapped names."""

    compared: int
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    differences: list[Difference]
    bytes_read: int
    notices: list[str]


def compare_checkpoints(
    here: Source, there: Source, options: Settings, *, progress: Progress | None = None
) -> Comparison:
    """Compare all tensors that both hold.

    Args:
        here: an open checkpoint.
        there: another one; formats and name forms may differ.
        options: with ``dtype`` both sides are cast to it before they are compared, and any NaN
            equals any other; without, every bit counts.
        progress: called as progress(done_bytes, total_bytes, name).

    Raises:
        PlanError: a table of one of them does not fit it.
    """
    config = _config(here) or _config(there)
    sides = [_side(source, _config(source) or config, options) for source in (here, there)]
    only_here, only_there, pairs = _paired(*sides)
    run = _Run(sides[0], sides[1], options, progress)
    run.total = 2 * sum(one.nbytes for one, _ in pairs)
    run.compare(pairs)
    for source in (here, there):
        source.check_unchanged()
    notices = [
        f"not compared: {len(side.plan.report.ignored)} stored buffers that no model loads "
        f"({listed(map(repr, side.plan.report.ignored), 3)})"
        for side in sides
        if side.plan.report.ignored
    ]
    return Comparison(len(pairs), only_here, only_there, run.differences, run.read, notices)


@dataclass(frozen=True)
class _Side:
    source: Source
    plan: Plan
    tensors: Mapping[str, PlannedTensor]
    ties: Sequence[Sequence[str]]


def _config(source: Source) -> Mapping[str, Any] | None:
    config = config_of(source)[0]
    if config is not None:
        return config
    try:
        return find_config(source)[0]  # GPT-2 is known by its names
    except CheckpointError:
        return None


def _side(source: Source, config: Mapping[str, Any] | None, options: Settings) -> _Side:
    """The tensors under local names; those a table does not know keep their own."""
    mapper = choose_mapper(config, source.catalog, None)
    options = replace(options, strict=False)
    plan = build_plan(source.catalog, mapper, None, options, source=source.path)
    left = set(plan.report.unexpected)
    if len(left) == len(source.catalog):
        plan = build_plan(source.catalog, None, None, options, source=source.path)
        left = set()
    plan.raise_if_refused()
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    if left:
        own = build_plan(
            source.catalog, lambda n: n if n in left else None, None, options, source=source.path
        )
        own.raise_if_refused()
        tensors = {**{t.name: t for t in own.tensors}, **tensors}
    ties = mapper.ties if isinstance(mapper, NameMap) else ()
    return _Side(source, plan, tensors, ties)


def _paired(
    here: _Side, there: _Side
) -> tuple[tuple[str, ...], tuple[str, ...], list[tuple[PlannedTensor, PlannedTensor]]]:
    """Names on one side only, and pairs; a tied name stands for the other."""
    groups = [*here.ties, *there.ties]

    def find(name: str, side: _Side) -> PlannedTensor | None:
        names = [name, *(n for group in groups if name in group for n in group)]
        return next((side.tensors[n] for n in names if n in side.tensors), None)

    pairs = [
        (one, two) for name, one in here.tensors.items() if (two := find(name, there)) is not None
    ]
    pairs += [
        (one, two)
        for name, two in there.tensors.items()
        if name not in here.tensors and (one := find(name, here)) is not None
    ]
    return (
        tuple(name for name in here.tensors if find(name, there) is None),
        tuple(name for name in there.tensors if find(name, here) is None),
        pairs,
    )


class _Run:
    """Goes through the pairs, a few slabs at a time."""

    def __init__(
        self, here: _Side, there: _Side, options: Settings, progress: Progress | None
    ) -> None:
        self.differences: list[Difference] = []
        self.read = 0
        self.total = 0
        self._sides = (here, there)
        self._any_nan = options.dtype is not None
        self._lane = CpuLane(chunk_bytes=options.chunk_bytes)
        self._progress = progress

    def compare(self, pairs: Sequence[tuple[PlannedTensor, PlannedTensor]]) -> None:
        """Compare every pair."""
        held: list[tuple[int, OutputChunk, OutputChunk]] = []
        size = 0
        found: dict[int, Difference] = {}
        for number, (one, two) in enumerate(pairs):
            difference = _unlike(one, two)
            if difference is not None:
                self.differences.append(difference)
                continue
            for chunks in _slab_pairs(one, two):
                held.append((number, *chunks))
                size += chunks[0].planned.nbytes
                if size >= _SLAB_BYTES:
                    self._settle(held, pairs, found)
                    held, size = [], 0
        self._settle(held, pairs, found)
        self.differences += found.values()

    def _settle(
        self,
        held: Sequence[tuple[int, OutputChunk, OutputChunk]],
        pairs: Sequence[tuple[PlannedTensor, PlannedTensor]],
        found: dict[int, Difference],
    ) -> None:
        if not held:
            return
        ones = self._made(self._sides[0], [one for _, one, _ in held])
        twos = self._made(self._sides[1], [two for _, _, two in held])
        for (number, chunk, _), one, two in zip(held, ones, twos, strict=True):
            counted = _count(one, two, any_nan=self._any_nan)
            if counted is not None:
                found[number] = _joined(found.get(number), pairs[number], chunk.start, counted)
        if self._progress is not None:
            self._progress(self.read, self.total, pairs[held[-1][0]][0].name)

    def _made(self, side: _Side, chunks: Sequence[OutputChunk]) -> list[torch.Tensor]:
        tensors = tuple(replace(chunk.planned, name=str(i)) for i, chunk in enumerate(chunks))
        names = {name for tensor in tensors for name in tensor.sources}
        stored = {name: side.plan.stored[name] for name in side.plan.stored if name in names}
        part = replace(side.plan, tensors=tensors, comparisons=(), stored=stored)
        run = execute(part, side.source, self._lane)
        self.read += run.bytes_read
        return [run.tensors[str(i)] for i in range(len(chunks))]


def _unlike(one: PlannedTensor, two: PlannedTensor) -> Difference | None:
    kind, detail = "", ""
    if one.shape != two.shape:
        kind, detail = "shape", f"shape {list(one.shape)} against {list(two.shape)}"
    elif one.dtype != two.dtype:
        names = [BY_NAME[t.dtype].torch_name for t in (one, two)]
        kind, detail = "dtype", f"{names[0]} against {names[1]}"
    return Difference(one.name, one.sources, two.sources, kind, detail) if kind else None


def _slab_pairs(
    one: PlannedTensor, two: PlannedTensor
) -> Iterator[tuple[OutputChunk, OutputChunk]]:
    """Both tensors cut at the same elements; whole where they cannot be."""
    ones, twos = (
        [chunk for batch in batches([tensor], _SLAB_BYTES) for chunk in batch]
        for tensor in (one, two)
    )
    if _cuts(ones) == _cuts(twos):
        yield from zip(ones, twos, strict=True)
    elif _is_plain(two):
        yield from ((chunk, _clipped(two, chunk)) for chunk in ones)
    elif _is_plain(one):
        yield from ((_clipped(one, chunk), chunk) for chunk in twos)
    else:
        yield _whole(one), _whole(two)


def _cuts(chunks: Sequence[OutputChunk]) -> list[tuple[int, int]]:
    return [(chunk.start, numel(chunk.planned.shape)) for chunk in chunks]


def _is_plain(tensor: PlannedTensor) -> bool:
    """True if it can be cut anywhere."""
    return all(m.source_strides == (1,) and m.target_strides == (1,) for m in tensor.copies)


def _clipped(tensor: PlannedTensor, chunk: OutputChunk) -> OutputChunk:
    """The elements of a plain tensor that ``slab`` holds of the other."""
    start, count = chunk.start, numel(chunk.planned.shape)
    copies = tuple(
        StridedCopy(
            m.stored_name,
            (high - low,),
            (1,),
            m.source_offset + low - m.target_offset,
            (1,),
            low - start,
        )
        for m in tensor.copies
        if (low := max(m.target_offset, start))
        < (high := min(m.target_offset + m.shape[0], start + count))
    )
    return OutputChunk(
        tensor.name, start, replace(tensor, shape=(count,), strides=(1,), copies=copies)
    )


def _whole(tensor: PlannedTensor) -> OutputChunk:
    return OutputChunk(tensor.name, 0, replace(tensor, shape=(numel(tensor.shape),), strides=(1,)))


@dataclass(frozen=True, slots=True)
class _Counted:
    elements: int
    first: int
    largest: float | None


def _count(one: torch.Tensor, two: torch.Tensor, *, any_nan: bool) -> _Counted | None:
    """How two flat tensors of one dtype differ, bit by bit; None if they do not."""
    bits = [_bits(tensor) for tensor in (one, two)]
    if torch.equal(*bits):
        return None
    unlike = bits[0] != bits[1]
    if one.is_complex():
        wide = [tensor.to(torch.complex128) for tensor in (one, two)]
    else:
        wide = [tensor.to(torch.float64) for tensor in (one, two)]
    unlike = unlike.view(one.numel(), -1).any(dim=1)
    if any_nan:
        unlike &= ~(wide[0].isnan() & wide[1].isnan())
    if not bool(unlike.any()):
        return None
    gap = (wide[0] - wide[1])[unlike].abs()
    gap = gap[gap.isfinite()]
    return _Counted(
        int(unlike.sum()),
        int(unlike.to(torch.uint8).argmax()),
        float(gap.max()) if gap.numel() else None,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS.get(tensor.element_size(), torch.uint8))


def _joined(
    before: Difference | None,
    pair: tuple[PlannedTensor, PlannedTensor],
    start: int,
    counted: _Counted,
) -> Difference:
    """A tensor's difference with what one more slab adds."""
    one, two = pair
    elements = counted.elements + (before.elements if before else 0)
    first = before.first if before else _index(start + counted.first, one.shape)
    gaps = [g for g in (counted.largest, before.largest if before else None) if g is not None]
    largest = max(gaps, default=None)
    detail = f"{elements} of {numel(one.shape)} values differ, first at {list(first)}"
    if largest is not None:
        detail += f", by at most {largest:.3g}"
    return Difference(
        one.name, one.sources, two.sources, "values", detail, elements, first, largest
    )


def _index(flat: int, shape: Shape) -> Shape:
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))
