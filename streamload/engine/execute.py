"""Carries out a plan: checks first, then new tensors, then tensors that are overwritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.autograd.graph import increment_version

from streamload.core.errors import CheckpointError, StreamloadError, note_overwritten
from streamload.core.findings import Finding, in_words
from streamload.core.options import Progress
from streamload.core.specs import stored_bytes
from streamload.core.wording import printable
from streamload.engine.arithmetic import is_whole
from streamload.engine.casts import can_overflow
from streamload.engine.groups import (
    AHEAD,
    Counter,
    Group,
    GroupFeed,
    Memory,
    in_layers,
)
from streamload.engine.jobs import JobQueue
from streamload.engine.lanes.base import NO_MEMORY, Lane
from streamload.engine.on_layer import OnLayer, Replacements
from streamload.engine.reduce import check_agreement, compare, reduce_into
from streamload.engine.workers import WorkerPool
from streamload.planning.records import Plan, PlannedTensor
from streamload.sources.base import Source
from streamload.sources.blocks import torch_dtype
from streamload.system.gc_pause import without_collections


@dataclass
class Execution(Replacements):
    """What came of a plan; the caller commits it.

    Attributes:
        bytes_read, bytes_written: of tensor data.
        findings: what was seen in the data.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def notices(self) -> tuple[str, ...]:
        return in_words(self.findings, refusing=False)


def execute(
    plan: Plan,
    source: Source,
    lane: Lane,
    *,
    existing: Mapping[str, Sequence[torch.Tensor]] | None = None,
    progress: Progress | None = None,
    release: bool = False,
    on_layer: OnLayer | None = None,
) -> Execution:
    """Stream or map every planned tensor.

    Args:
        plan: must hold.
        source: the checkpoint the plan was made from.
        lane: makes and writes tensors.
        existing: tensors that are overwritten in place, by target name; where there are several,
            they hold the same memory. Each that may have changed counts one version more.
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
    targets = existing or {}
    new = [t for t in plan.tensors if t.is_new]
    old = [t for t in plan.tensors if not t.is_new]
    names = {c.stored_name for t in plan.tensors if t.mapped is None for c in t.copies}
    counter = Counter(stored_bytes(plan.stored[name] for name in names), progress)
    stream = _Stream(plan, source, lane, run, counter, release)

    def keep(group: Group, tensors: dict[str, torch.Tensor]) -> None:
        returned = None
        if on_layer is not None:
            lane.finish()
            returned = on_layer(group.layer, dict(tensors))
            returned = {} if returned is None else returned
        run.take(group, tensors, returned)

    try:
        _check(plan, source, run)
        stream.fill([Group(None, new)] if on_layer is None else in_layers(new), lane.allocate, keep)
        if old:
            stream.rehearse(old)
        source.check_unchanged()
        if old:
            # ``data`` counts versions apart, so that the number of chunks does not show.
            stream.fill([Group(None, old)], lambda t: targets[t.name][0].data, lambda *_: None)
            source.check_unchanged()
        lane.finish()
    except BaseException as error:
        run.tensors.clear()
        run.modules.clear()
        if run.overwritten:
            note_overwritten(error, run.overwritten)
        raise
    finally:
        for name in run.overwritten:
            _tell_autograd(targets[name])
    run.findings += map(Finding, lane.notices())
    run.bytes_read += counter.done
    run.bytes_written = plan.bytes_to_write
    return run


def _tell_autograd(tensors: Sequence[torch.Tensor]) -> None:
    """As after ``Tensor.copy_``: a backward pass over values saved before this raises."""
    for tensor in tensors:
        if not tensor.is_inference():  # these count no versions
            increment_version(tensor)


def _check(plan: Plan, source: Source, run: Execution) -> None:
    """Everything in the data that can refuse the load, before anything is written."""
    for comparison in plan.comparisons:
        notice = compare(plan, source, comparison)
        run.findings += [Finding(notice)] if notice else []
    largest, where = 0.0, ""
    for planned in plan.tensors:
        if planned.reduces == "mean":
            difference = check_agreement(plan, source, planned)
            if difference > largest:
                largest, where = difference, planned.name
    if where:
        lead = f"partitions that should agree differ by at most {largest:.3g} (in "
        text = "); their mean was taken"
        run.findings.append(Finding(text, tensor=where, lead=lead))


@dataclass(frozen=True)
class _Stream:
    """The one loop that fills targets; whatever the load, only its groups differ."""

    plan: Plan
    source: Source
    lane: Lane
    run: Execution
    counter: Counter
    release: bool

    def fill(
        self,
        groups: Sequence[Group],
        memory: Memory,
        keep: Callable[[Group, dict[str, torch.Tensor]], None],
        *,
        ahead: int = AHEAD,
    ) -> None:
        """Fill all targets of the groups, and hand each group to ``keep`` when it is complete."""
        count = sum(len(group.tensors) for group in groups)
        # Blocks that are handed out may leave cycles, and memory in them.
        with without_collections(count if len(groups) == 1 else 0):
            if count:
                self._fill(groups, memory, keep, ahead)

    def _fill(
        self,
        groups: Sequence[Group],
        memory: Memory,
        keep: Callable[[Group, dict[str, torch.Tensor]], None],
        ahead: int,
    ) -> None:
        overflows: dict[str, int] = {}
        feed = GroupFeed(
            self.plan,
            groups,
            memory,
            self.counter,
            opening=self.lane.opening,
            batch_bytes=self.lane.batch_bytes,
        )

        def tick() -> None:
            self.counter.tell()
            for group in feed.completed():
                keep(group, self._tensors(group, feed, memory, overflows))

        moved = [t for group in groups for t in group.tensors if t.is_moved]
        try:
            feed.open_next(ahead)
            queue = JobQueue(feed.jobs())
            pool = WorkerPool(self.source, self.lane, queue, feed, release=self.release)
            # One is enough where there is hardly more than a chunk to read, none where nothing is.
            options = self.plan.options
            is_small = sum(t.nbytes for t in moved) <= options.chunk_bytes
            workers = 1 if is_small else options.workers
            pool.run(workers if moved else 0, tick=tick)
        finally:
            touched = [t.name for t in moved if feed.by_name[t.name].touched and not t.is_new]
            self.run.overwritten += touched
        overflows |= {t.name: feed.by_name[t.name].overflows for t in moved}
        self._tell_overflows(groups, overflows)
        self.counter.tell()

    def _tensors(
        self, group: Group, feed: GroupFeed, memory: Memory, overflows: dict[str, int]
    ) -> dict[str, torch.Tensor]:
        """A complete group's tensors; those that no worker fills are made here."""
        tensors = {}
        for planned in group.tensors:
            if planned.is_moved:
                destination = feed.by_name[planned.name]
                tensors[planned.name], destination.tensor = destination.tensor, NO_MEMORY
            elif planned.mapped is not None:
                tensors[planned.name] = _mapped(self.source, planned)
            else:
                tensors[planned.name] = self._reduce(planned, memory, overflows)
        return tensors

    def rehearse(self, tensors: Sequence[PlannedTensor]) -> None:
        """Make the tensors that may be refused, one at a time, and throw them away.

        What is overwritten in place cannot be taken back: sums that do not fit, and overflows
        where these are refused, must be known before the first byte is written.
        """
        risky = [Group(None, [replace(t, is_new=True)]) for t in tensors if self._may_refuse(t)]
        alone = replace(self, counter=Counter(0), run=Execution())
        alone.fill(risky, self.lane.allocate, lambda *_: None, ahead=1)

    def _may_refuse(self, tensor: PlannedTensor) -> bool:
        refuses_overflow = self.plan.options.overflow == "refuse"
        if tensor.reduces:
            return refuses_overflow or is_whole(torch_dtype(tensor.dtype))
        return refuses_overflow and any(
            can_overflow(torch_dtype(self.plan.stored[name].dtype), torch_dtype(tensor.dtype))
            for name in tensor.sources
        )

    def _reduce(
        self, planned: PlannedTensor, memory: Memory, overflows: dict[str, int]
    ) -> torch.Tensor:
        target = memory(planned)
        if not planned.is_new:
            self.run.overwritten.append(planned.name)
        with torch.no_grad():
            overflows[planned.name] = reduce_into(self.plan, self.source, planned, target)
        for name in dict.fromkeys(planned.sources):
            spec = self.plan.stored[name]
            self.counter.add(stored_bytes((spec,)), spec.name)
        return target

    def _tell_overflows(self, groups: Sequence[Group], counts: Mapping[str, int]) -> None:
        lost = [
            Finding(f": {{count}} finite values overflow {t.dtype}", tensor=t.name, count=count)
            for group in groups
            for t in group.tensors
            if (count := counts.get(t.name, 0))
        ]
        if lost and self.plan.options.overflow == "refuse":
            more = f"; and {len(lost) - 8} more tensors" if len(lost) > 8 else ""
            raise StreamloadError(
                f"{printable(self.plan.source)}: {'; '.join(map(str, lost[:8]))}{more}; "
                "overflow='report' loads them as infinity"
            )
        self.run.findings += lost


def _mapped(source: Source, planned: PlannedTensor) -> torch.Tensor:
    view = planned.mapped
    assert view is not None, "only called for mapped targets"
    mapped = source.mapped(view.stored_name, (planned.shape, view.strides, view.offset))
    if mapped is None:
        raise CheckpointError(
            "cannot be mapped as planned", path=source.path, tensor=view.stored_name
        )
    return mapped
