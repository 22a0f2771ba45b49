"""Targets that need arithmetic, and stored tensors that must agree: small, done in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from streamload.core.errors import CheckpointError
from streamload.core.specs import StridedCopy, numel
from streamload.engine.casts import can_overflow, count_overflows
from streamload.engine.jobs import Reader
from streamload.planning.records import Comparison, Plan, PlannedTensor
from streamload.sources.base import Source
from streamload.sources.blocks import bytes_of, torch_dtype


def _stored_values(plan: Plan, source: Source, copy: StridedCopy) -> torch.Tensor:
    """The elements that a copy takes of its stored tensor, all of which is read."""
    spec = plan.stored[copy.stored_name]
    values = torch.empty(numel(spec.shape), dtype=torch_dtype(spec.dtype))
    Reader(source, spec)(0, values.numel(), bytes_of(values))
    return torch.as_strided(values, copy.shape, copy.source_strides, copy.source_offset)


def _placed(
    plan: Plan, source: Source, planned: PlannedTensor, target: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the flat ``target``, and the stored values that go there."""
    for copy in planned.copies:
        view = torch.as_strided(target, copy.shape, copy.target_strides, copy.target_offset)
        yield view, _stored_values(plan, source, copy)


def reduce_into(plan: Plan, source: Source, planned: PlannedTensor, target: torch.Tensor) -> int:
    """Write the sum or mean of all sources, taken in float32, once.

    Returns:
        How many finite results overflow the target's dtype.
    """
    total = torch.zeros(numel(planned.shape), dtype=torch.float32)
    for view, values in _placed(plan, source, planned, total):
        view.add_(values.float())
    if planned.reduces == "mean":
        total /= len(planned.copies)
    total = total.view(planned.shape)
    target.copy_(total)
    return count_overflows(total, target) if can_overflow(total.dtype, target.dtype) else 0


def check_agreement(plan: Plan, source: Source, planned: PlannedTensor) -> float:
    """The largest difference between replicas of a mean.

    Raises:
        CheckpointError: the sum of squared differences is over the tolerance, and averaging
            anyway (``replicas="average"``) was not asked for.
    """
    first: torch.Tensor | None = None
    largest = 0.0
    for copy in planned.copies:
        values = _stored_values(plan, source, copy).float()
        if first is None:
            first = values
            continue
        difference = values - first
        squares = float(difference.double().square().sum())
        largest = max(largest, float(difference.abs().max()) if difference.numel() else 0.0)
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
    for view, values in _placed(plan, source, planned, target):
        view.copy_(values)
    return target
