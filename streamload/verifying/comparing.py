"""Compares two checkpoints tensor by tensor, in bounded memory, under their mapped names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.options import Progress, Settings
from streamload.core.specs import numel
from streamload.engine.arithmetic import gaps
from streamload.engine.lanes.cpu import CpuLane
from streamload.engine.output_chunks import batches, execute_chunks
from streamload.mapping.choose import choose_binding
from streamload.mapping.configuration import config_or_guess
from streamload.mapping.rules import NameMap
from streamload.planning.build import build_plan
from streamload.planning.explaining import listed
from streamload.planning.records import Plan, PlannedTensor
from streamload.sources.base import Source
from streamload.verifying.pieces import bytes_in_files
from streamload.verifying.verify_report import Difference, VerifyReport

_BATCH_BYTES = 32 << 20  # of each side; a transposed tensor is read anew for each batch
_COMPARED = 4 << 20  # elements: where they differ, both sides are widened
# Number of the pair, index of the first element, flat values.
_Values = tuple[int, int, torch.Tensor]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_checkpoints(
    here: Source, there: Source, options: Settings, *, progress: Progress | None = None
) -> VerifyReport:
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
    unlike = [_unlike(*pair) for pair in pairs]
    alike = [pair for pair, found in zip(pairs, unlike, strict=True) if found is None]
    reading = _Reading(alike, options, progress)
    differences = [d for d in unlike if d is not None] + [*reading.differences(*sides)]
    for source in (here, there):
        source.check_unchanged()
    notices = tuple(
        f"not compared: {len(side.plan.report.ignored)} stored buffers that no model loads "
        f"({listed(map(repr, side.plan.report.ignored), 3)})"
        for side in sides
        if side.plan.report.ignored
    )
    return VerifyReport(
        tensors=len(pairs),
        differences=tuple(differences),
        only_here=only_here,
        only_there=only_there,
        notices=notices,
        files=dict(sorted(_compared(sides, alike).items())),
        bytes_read=reading.bytes_read,
    )


def _compared(
    sides: Sequence[_Side], pairs: Sequence[tuple[PlannedTensor, PlannedTensor]]
) -> dict[str, int]:
    """Bytes of each file that were compared; the same file on both sides is read twice."""
    found: Counter[str] = Counter()
    for at, side in enumerate(sides):
        names = {name for pair in pairs for name in pair[at].sources}
        found.update(bytes_in_files(side.plan.stored[name] for name in names))
    return found


@dataclass(frozen=True)
class _Side:
    source: Source
    plan: Plan
    tensors: Mapping[str, PlannedTensor]
    ties: Sequence[Sequence[str]]


def _config(source: Source) -> Mapping[str, Any] | None:
    return config_or_guess(source.config(), source.catalog)[0]


def _side(source: Source, config: Mapping[str, Any] | None, options: Settings) -> _Side:
    """The tensors under local names; those a table does not know keep their own."""
    mapper, _ = choose_binding(config, source.catalog, None)
    options = replace(options, strict=False)
    plan = build_plan(source.catalog, mapper, None, options, source=source.path)
    if not source.catalog:
        return _Side(source, plan, {}, ())  # its plan is refused; here it is a difference
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

    only_here, only_there, pairs = [], [], []
    for name, one in here.tensors.items():
        if (two := find(name, there)) is None:
            only_here.append(name)
        else:
            pairs.append((one, two))
    for name, two in there.tensors.items():
        if (found := find(name, here)) is None:
            only_there.append(name)
        elif name not in here.tensors:
            pairs.append((found, two))
    return tuple(only_here), tuple(only_there), pairs


class _Reading:
    """Reads pairs of one shape and dtype, a batch of each side at a time."""

    def __init__(
        self,
        pairs: Sequence[tuple[PlannedTensor, PlannedTensor]],
        options: Settings,
        progress: Progress | None,
    ) -> None:
        self.bytes_read = 0
        self._pairs = pairs
        self._total = 2 * sum(one.nbytes for one, _ in pairs)
        self._any_nan = options.dtype is not None
        self._lane = CpuLane(chunk_bytes=options.chunk_bytes)
        self._progress = progress

    def differences(self, here: _Side, there: _Side) -> Iterator[Difference]:
        """Compare the values of every pair."""
        tallies = [_Tally() for _ in self._pairs]
        ones = self._values(here, [one for one, _ in self._pairs])
        twos = self._values(there, [two for _, two in self._pairs])
        for number, start, here_values, there_values in _cut_alike(ones, twos):
            _count(here_values, there_values, start, tallies[number], any_nan=self._any_nan)
        for (one, two), tally in zip(self._pairs, tallies, strict=True):
            if tally.elements:
                yield _difference(one, two, tally)

    def _values(self, side: _Side, tensors: Sequence[PlannedTensor]) -> Iterator[_Values]:
        # Numbered, as a tied tensor may be in several pairs.
        numbered = [replace(tensor, name=str(i)) for i, tensor in enumerate(tensors)]
        for batch in batches(numbered, _BATCH_BYTES):
            run = execute_chunks(side.plan, side.source, batch, self._lane)
            self.bytes_read += run.bytes_read
            if self._progress is not None:
                name = self._pairs[int(batch[-1].name)][0].name
                self._progress(self.bytes_read, self._total, name)
            for chunk in batch:
                yield int(chunk.name), chunk.start, run.tensors.pop(chunk.key)


def _cut_alike(
    ones: Iterator[_Values], twos: Iterator[_Values]
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """The same elements of both sides, whose chunks may end at different elements."""
    two = torch.empty(0)
    for number, start, one in ones:
        while one.numel():
            while not two.numel():
                two = next(twos)[2]
            count = min(one.numel(), two.numel(), _COMPARED)
            yield number, start, one[:count], two[:count]
            start, one, two = start + count, one[count:], two[count:]


def _unlike(one: PlannedTensor, two: PlannedTensor) -> Difference | None:
    """How shapes or dtypes differ; None if values can be compared."""
    unlike = partial(Difference, one.name, one.sources, two.sources)
    if one.shape != two.shape:
        return unlike("shape", f"shape {list(one.shape)} against {list(two.shape)}")
    if one.dtype != two.dtype:
        names = [BY_NAME[t.dtype].torch_name for t in (one, two)]
        return unlike("dtype", f"{names[0]} against {names[1]}", dtypes=(one.dtype, two.dtype))
    return None


@dataclass
class _Tally:
    """How many values of a tensor differ, the flat index of the first, and the largest gap."""

    elements: int = 0
    first: int = 0
    largest: float | None = None


def _count(
    one: torch.Tensor, two: torch.Tensor, start: int, tally: _Tally, *, any_nan: bool
) -> None:
    """Add how two flat runs of one dtype differ, bit by bit; ``start`` is their place."""
    bits = [_bits(tensor) for tensor in (one, two)]
    if torch.equal(*bits):
        return
    unlike = (bits[0] != bits[1]).view(one.numel(), -1).any(dim=1)
    nan = _both_nan(one, two)
    if any_nan:
        unlike &= ~nan
    if not bool(unlike.any()):
        return
    if not tally.elements:
        tally.first = start + int(unlike.to(torch.uint8).argmax())
    tally.elements += int(unlike.sum())
    gap = gaps(one, two)[unlike & ~nan]
    gap = gap[gap.isfinite()]
    if gap.numel():
        tally.largest = max(float(gap.max()), tally.largest or 0.0)


def _both_nan(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if one.is_complex() else torch.float64  # float8 has no isnan()
    return one.to(wide).isnan() & two.to(wide).isnan()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS.get(tensor.element_size(), torch.uint8))


def _difference(one: PlannedTensor, two: PlannedTensor, tally: _Tally) -> Difference:
    first = tuple(map(int, np.unravel_index(tally.first, one.shape)))
    detail = f"{tally.elements} of {numel(one.shape)} values differ, first at {list(first)}"
    if tally.largest is not None:
        detail += f", by at most {tally.largest:.3g}"
    found = (tally.elements, first, tally.largest)
    return Difference(one.name, one.sources, two.sources, "values", detail, *found)
