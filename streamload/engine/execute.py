"""Carries out a plan: checks first, then new tensors, then tensors that are overwritten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import nn

from streamload.core.errors import CheckpointError, StreamloadError, note_overwritten, printable
from streamload.engine.casts import can_overflow
from streamload.engine.jobs import Job, JobQueue, jobs_of
from streamload.engine.lanes.base import Destination, Lane
from streamload.engine.on_layer import LayerFeed, OnLayer
from streamload.engine.reduce import check_agreement, compare, reduce_into
from streamload.engine.workers import WorkerPool
from streamload.planning.records import Plan, PlannedTensor
from streamload.sources.base import Source
from streamload.sources.blocks import torch_dtype

__all__ = ["Execution", "Progress", "execute"]

# progress(done_bytes, total_bytes, tensor_name), from the thread that called the load.
Progress: TypeAlias = Callable[[int, int, str], object]


@dataclass
class Execution:
    """What came of a plan.

    Attributes:
        tensors: new tensors by target name; the caller commits them.
        overwritten: names of tensors overwritten in place, as far as it came.
        bytes_read, bytes_written: of tensor data.
        notices: what was seen in the data.
        modules: what on_layer gave for whole modules, by module name; ``tensors`` lacks what is
            in these.
        given: names of tensors that on_layer gave.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    overwritten: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_written: int = 0
    notices: list[str] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)


def execute(
    plan: Plan,
    source: Source,
    lane: Lane,
    *,
    existing: Mapping[str, torch.Tensor] | None = None,
    progress: Progress | None = None,
    release: bool = False,
    on_layer: OnLayer | None = None,
) -> Execution:
    """Stream or map every planned tensor.

    Args:
        plan: must hold.
        source: the checkpoint the plan was made from.
        lane: makes and writes tensors.
        existing: tensors that are overwritten in place, by target name.
        progress: called now and then with bytes done, bytes in all, and a stored name.
        release: give the page cache back behind the workers (a memory limit binds).
        on_layer: gets each block's new tensors when they are complete; the plan must not
            overwrite any.

    Raises:
        ReadError, CheckpointError: as the source or the data give cause; MemoryError and
            whatever ``progress`` and ``on_layer`` raise pass through unchanged. New tensors are
            dropped.
    """
    run = Execution()
    _check(plan, source, run)
    new = [t for t in plan.tensors if t.is_new and t.mapped is None]
    old = [t for t in plan.tensors if not t.is_new]
    counter = _Counter(plan, new + old, progress)
    try:
        if on_layer is not None:
            _stream_layers(plan, source, lane, counter, run, release, on_layer)
        else:
            for planned in plan.tensors:
                if planned.mapped is not None:
                    run.tensors[planned.name] = _mapped(source, planned)
            run.tensors.update({t.name: lane.allocate(t) for t in new})
            destinations = _stream(plan, source, lane, new, run.tensors, counter, run, release)
            _report_overflows(plan, new, destinations, run)
        if plan.options.overflow == "refuse":
            _rehearse(plan, source, lane, old, run, release)
        source.check_unchanged()
        if old:
            destinations = _stream(plan, source, lane, old, existing or {}, counter, run, release)
            _report_overflows(plan, old, destinations, run)
            source.check_unchanged()
        lane.finish()
    except BaseException as error:
        run.tensors.clear()
        run.modules.clear()
        if run.overwritten:
            note_overwritten(error, run.overwritten)
        raise
    run.bytes_read += counter.done
    run.bytes_written = sum(t.nbytes for t in new + old)
    return run


def _check(plan: Plan, source: Source, run: Execution) -> None:
    """Everything in the data that can refuse the load, before anything is written."""
    for comparison in plan.comparisons:
        notice = compare(plan, source, comparison)
        run.notices += [notice] if notice else []
    largest, where = 0.0, ""
    for planned in plan.tensors:
        if planned.reduces == "mean":
            difference = check_agreement(plan, source, planned)
            if difference > largest:
                largest, where = difference, planned.name
    if where:
        run.notices.append(
            f"partitions that should agree differ by at most {largest:.3g} (in {where!r}); their "
            "float32 mean was taken"
        )


def _mapped(source: Source, planned: PlannedTensor) -> torch.Tensor:
    view = planned.mapped
    assert view is not None, "only called for mapped targets"
    base = source.mapped(view.stored_name)
    if base is None:
        raise CheckpointError(
            "cannot be mapped as planned", path=source.path, tensor=view.stored_name
        )
    offset = base.storage_offset() + view.offset
    return torch.as_strided(base, planned.shape, view.strides, offset)


class _Counter:
    """Bytes done, counted by the workers and told from the calling thread."""

    def __init__(
        self, plan: Plan, tensors: Sequence[PlannedTensor], progress: Progress | None
    ) -> None:
        names = {m.stored_name for t in tensors for m in t.copies}
        self.total = sum(plan.stored[name].nbytes for name in names)
        self.done = 0
        self._name = ""
        self._told = -1
        self._lock = threading.Lock()
        self._progress = progress

    def add(self, job: Job) -> bool:
        self.add_bytes(job.nbytes, job.spec.name)
        return False

    def add_bytes(self, count: int, name: str) -> None:
        with self._lock:
            self.done += count
            self._name = name

    def tell(self) -> None:
        if self._progress is not None and self.done != self._told:
            self._told = self.done
            self._progress(self.done, self.total, self._name)


def _stream(
    plan: Plan,
    source: Source,
    lane: Lane,
    tensors: Sequence[PlannedTensor],
    targets: Mapping[str, torch.Tensor],
    counter: _Counter,
    run: Execution,
    release: bool,
) -> list[Destination]:
    """Fill ``targets``: arithmetic first (it is small), then all plain copies by the workers.

    Returns:
        What was written, in the order of ``tensors``.
    """
    destinations = [Destination(targets[t.name], t.device, is_fresh=t.is_new) for t in tensors]
    pairs = list(zip(tensors, destinations, strict=True))
    moved = [pair for pair in pairs if not pair[0].reduces]
    try:
        _reduce(plan, source, [pair for pair in pairs if pair[0].reduces], counter)
        queue = JobQueue(
            jobs_of(plan, [t for t, _ in moved], {t.name: i for i, (t, _) in enumerate(moved)})
        )
        pool = WorkerPool(
            source, lane, queue, [s for _, s in moved], done=counter.add, release=release
        )
        if moved:
            pool.run(_pool_size(plan, [t for t, _ in moved]), tick=counter.tell)
    finally:
        run.overwritten += [
            t.name for t, destination in pairs if destination.touched and not t.is_new
        ]
    return destinations


def _reduce(
    plan: Plan,
    source: Source,
    tensors: Sequence[tuple[PlannedTensor, Destination]],
    counter: _Counter,
) -> None:
    with torch.no_grad():
        for planned, destination in tensors:
            destination.touched = True
            destination.overflows = reduce_into(plan, source, planned, destination.tensor)
            for name in dict.fromkeys(planned.sources):
                counter.add_bytes(plan.stored[name].nbytes, plan.stored[name].name)


def _rehearse(
    plan: Plan,
    source: Source,
    lane: Lane,
    tensors: Sequence[PlannedTensor],
    run: Execution,
    release: bool,
) -> None:
    """Cast the tensors that may overflow, one at a time, and throw them away.

    What is overwritten in place cannot be taken back: where overflows are refused, they must be
    known before the first byte is written.
    """
    risky = [
        replace(t, is_new=True)
        for t in tensors
        if any(_can_overflow(plan.stored[name].dtype, t.dtype) for name in t.sources)
    ]
    destinations: list[Destination] = []
    for planned in risky:
        made = {planned.name: lane.allocate(planned)}
        counter = _Counter(plan, [planned], None)
        destinations += _stream(plan, source, lane, [planned], made, counter, run, release)
        destinations[-1].tensor = torch.empty(0)
    _report_overflows(plan, risky, destinations, run)


def _can_overflow(stored: str, target: str) -> bool:
    return can_overflow(torch_dtype(stored), torch_dtype(target))


def _stream_layers(
    plan: Plan,
    source: Source,
    lane: Lane,
    counter: _Counter,
    run: Execution,
    release: bool,
    on_layer: OnLayer,
) -> None:
    """As ``_stream`` for all new tensors, block by block, with what on_layer makes of them."""
    reduced: list[tuple[PlannedTensor, Destination]] = []

    def make(planned: PlannedTensor, target: torch.Tensor | None) -> torch.Tensor:
        if target is None:
            return _mapped(source, planned)
        reduced.append(
            (planned, Destination(target, overflows=reduce_into(plan, source, planned, target)))
        )
        return target

    feed = LayerFeed(plan, [t for t in plan.tensors if t.is_new], lane, make, on_layer)

    def done(job: Job) -> bool:
        counter.add(job)
        return feed.done(job)

    def tick() -> None:
        counter.tell()
        feed.deliver()

    feed.start()
    queue = JobQueue(feed.jobs())
    pool = WorkerPool(source, lane, queue, feed.destinations, done=done, release=release, gate=feed)
    pool.run(_pool_size(plan, feed.moved), tick=tick)
    tensors = [*feed.moved, *(t for t, _ in reduced)]
    _report_overflows(plan, tensors, [*feed.destinations, *(s for _, s in reduced)], run)
    run.tensors, run.modules = feed.results.tensors, feed.results.modules
    run.given = feed.results.given


def _pool_size(plan: Plan, tensors: Sequence[PlannedTensor]) -> int:
    """One worker is enough where there is hardly more than a block to read."""
    small = sum(t.nbytes for t in tensors) <= plan.options.chunk_bytes
    return 1 if small else plan.options.workers


def _report_overflows(
    plan: Plan,
    tensors: Sequence[PlannedTensor],
    destinations: Sequence[Destination],
    run: Execution,
) -> None:
    lost = [(t, s.overflows) for t, s in zip(tensors, destinations, strict=True) if s.overflows]
    if not lost:
        return
    lines = [f"{t.name!r}: {count} finite values overflow {t.dtype}" for t, count in lost]
    if plan.options.overflow == "refuse":
        more = f"; and {len(lines) - 8} more tensors" if len(lines) > 8 else ""
        raise StreamloadError(
            f"{printable(plan.report.source)}: {'; '.join(lines[:8])}{more}; "
            "overflow='report' loads them as infinity"
        )
    run.notices += lines
