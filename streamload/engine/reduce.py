"""Targets that need arithmetic, and stored tensors that must agree: small, held whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

import torch

from streamload.core.errors import CheckpointError
from streamload.core.specs import StridedCopy, numel
from streamload.engine.arithmetic import Part, gaps, is_whole, summed, whole_sum, wide_enough
from streamload.engine.casts import can_overflow, count_overflows
from streamload.planning.records import Comparison, Plan, PlannedTensor
from streamload.sources.base import Source
from streamload.sources.blocks import bytes_of, torch_dtype
from streamload.sources.wrapping.reader import Reader


def _stored_values(plan: Plan, source: Source, copy: StridedCopy) -> torch.Tensor:
    """The elements that a copy takes of its stored tensor, all of which is read."""
    spec = plan.stored[copy.stored_name]
    values = torch.empty(numel(spec.shape), dtype=torch_dtype(spec.dtype))
    Reader(source, spec)(0, values.numel(), bytes_of(values))
    return torch.as_strided(values, copy.shape, copy.source_strides, copy.source_offset)


def _placed(plan: Plan, source: Source, planned: PlannedTensor) -> Iterator[Part]:
    """Where in the flat target each copy goes, and its stored values."""
    for copy in planned.copies:
        view = copy.shape, copy.target_strides, copy.target_offset
        yield view, _stored_values(plan, source, copy)


def reduce_into(plan: Plan, source: Source, planned: PlannedTensor, target: torch.Tensor) -> int:
    """Write the sum or mean of all sources once; see ``arithmetic`` for the types.

    Returns:
        How many results of finite values alone are not finite in the target's dtype.

    Raises:
        CheckpointError: a sum of integers overflows, or their mean is not whole.
    """
    count = numel(planned.shape)
    partitions = sum(numel(copy.shape) for copy in planned.copies) // max(count, 1)
    divisor = max(partitions, 1) if planned.reduces == "mean" else 1
    if is_whole(target.dtype):
        target.copy_(_whole(plan, source, planned, divisor).view(planned.shape))
        return 0
    dtypes = [torch_dtype(plan.stored[name].dtype) for name in planned.sources]
    wide = max(map(wide_enough, dtypes), key=lambda dtype: dtype.itemsize)
    total = summed(_placed(plan, source, planned), count, wide)
    total /= divisor
    made = total.view(planned.shape)
    if target.device.type != "cpu":
        made = made.to(target.dtype)  # what overflows is counted where the sum is
    target.copy_(made)
    lost = 0
    if can_overflow(wide, target.dtype):
        cast = target if target.device.type == "cpu" else made
        lost = count_overflows(total.view(planned.shape), cast)
    return lost + _infinite(plan, source, planned, total)


def _whole(plan: Plan, source: Source, planned: PlannedTensor, divisor: int) -> torch.Tensor:
    count, dtype = numel(planned.shape), torch_dtype(planned.dtype)
    try:
        return whole_sum(_placed(plan, source, planned), count, dtype, divisor=divisor)
    except ArithmeticError as error:
        spec = plan.stored[planned.sources[0]]
        raise CheckpointError(
            f"the {planned.reduces} of the partitions of {planned.name!r} cannot be taken: {error}",
            path=spec.file,
            tensor=spec.name,
        ) from error


def _infinite(plan: Plan, source: Source, planned: PlannedTensor, total: torch.Tensor) -> int:
    """How many sums are not finite though all that went into them is."""
    lost = ~total.isfinite()
    if bool(lost.any()):
        for view, values in _placed(plan, source, planned):
            torch.as_strided(lost, *view).logical_and_(values.to(total.dtype).isfinite())
    return int(lost.sum())


def check_agreement(plan: Plan, source: Source, planned: PlannedTensor) -> float:
    """The largest difference between replicas of a mean; all of a value is compared.

    Raises:
        CheckpointError: the sum of squared differences is over the tolerance, and averaging
            anyway (``replicas="average"``) was not asked for.
    """
    count = numel(planned.shape)
    first: torch.Tensor | None = None
    filled, largest = 0, 0.0
    for copy in planned.copies:
        values = _stored_values(plan, source, copy)
        if first is None:
            dtypes = (torch_dtype(plan.stored[name].dtype) for name in planned.sources)
            first = torch.empty(count, dtype=reduce(torch.promote_types, map(_comparable, dtypes)))
        place = torch.as_strided(first, copy.shape, copy.target_strides, copy.target_offset)
        values = values.to(first.dtype)
        if filled < count:
            place.copy_(values)
            filled += values.numel()
            continue
        difference = gaps(values, place)
        squares = float(difference.square().sum())
        largest = max(largest, float(difference.max()) if difference.numel() else 0.0)
        # Written so that a NaN is refused too.
        if not squares < planned.tolerance and plan.options.replicas != "average":
            spec = plan.stored[copy.stored_name]
            raise CheckpointError(
                f"the partitions of {planned.name!r} must agree, but the squared differences sum "
                f"to {squares:.3g} (largest difference {largest:.3g}, tolerance "
                f"{planned.tolerance:g}); replicas='average' takes their mean anyway",
                path=spec.file,
                tensor=spec.name,
            )
    return largest


def _comparable(dtype: torch.dtype) -> torch.dtype:
    """Whole numbers as they are; others in the type that they are summed in."""
    return dtype if is_whole(dtype) else wide_enough(dtype)


def compare(plan: Plan, source: Source, comparison: Comparison) -> str | None:
    """Compare two stored tensors that fall on one tied tensor.

    Returns:
        None if they are equal, else a notice (``ties="keep"``).

    Raises:
        CheckpointError: they differ, and ``ties="keep"`` was not asked for.
    """
    kept, other = comparison.kept, comparison.other
    if _equal(plan, source, kept, other):
        return None
    text = (
        f"{' + '.join(other.sources)!r} differs from {' + '.join(kept.sources)!r}, but the model "
        f"ties {' and '.join(repr(n) for n in (kept.name, *kept.aliases))}"
    )
    if plan.options.ties == "keep":
        return f"{text}; {' + '.join(kept.sources)!r} was kept"
    spec = plan.stored[other.sources[0]]
    raise CheckpointError(f"{text}; ties='keep' keeps the first", path=spec.file, tensor=spec.name)


def _equal(plan: Plan, source: Source, kept: PlannedTensor, other: PlannedTensor) -> bool:
    pair = [t.copies[0] for t in (kept, other) if len(t.copies) == 1]
    specs = [plan.stored[t.sources[0]] for t in (kept, other)]
    runs = len(pair) == 2 and all(copy.is_run for copy in pair)
    if runs and specs[0].dtype == specs[1].dtype and pair[0].shape == pair[1].shape:
        return _equal_blocks(plan, source, pair[0], pair[1])
    return torch.equal(
        _assembled(plan, source, kept).view(torch.uint8),
        _assembled(plan, source, other).view(torch.uint8),
    )


def _equal_blocks(plan: Plan, source: Source, one: StridedCopy, two: StridedCopy) -> bool:
    """Bit by bit, one block of each at a time."""
    spec = plan.stored[one.stored_name]
    dtype = torch_dtype(spec.dtype)
    reads = [Reader(source, plan.stored[m.stored_name]) for m in (one, two)]
    step = max(plan.options.chunk_bytes // dtype.itemsize, 1)
    for start in range(0, one.shape[0], step):
        count = min(step, one.shape[0] - start)
        blocks = []
        for read, copy in zip(reads, (one, two), strict=True):
            values = torch.empty(count, dtype=dtype)
            begin = copy.source_offset + start
            read(begin, begin + count, bytes_of(values))
            blocks.append(values.view(torch.uint8))
        if not torch.equal(*blocks):
            return False
    return True


def _assembled(plan: Plan, source: Source, planned: PlannedTensor) -> torch.Tensor:
    """The target as a flat tensor of its own, cast."""
    target = torch.empty(numel(planned.shape), dtype=torch_dtype(planned.dtype))
    if planned.reduces:
        reduce_into(plan, source, replace(planned, shape=(target.numel(),)), target)
        return target
    for view, values in _placed(plan, source, planned):
        torch.as_strided(target, *view).copy_(values)
    return target
