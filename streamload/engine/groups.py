"""Targets in groups: each gets memory in its turn, is filled, and handed on when complete.

A plain load is one group. With ``on_layer`` each block is one, and a rehearsal of casts has a
group for each tensor. At most ``ahead`` groups have memory at once beside those already handed
on: the workers wait until the calling thread, which hands them on, has come so far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from streamload.core.options import Progress
from streamload.engine.jobs import Job, jobs_of
from streamload.engine.joining import joined
from streamload.engine.lanes.base import NO_MEMORY, Destination
from streamload.planning.needed_memory import on_host
from streamload.planning.records import Plan, PlannedTensor

# One is handed on while the next is filled.
AHEAD = 2


@dataclass(eq=False)
class Group:
    """Targets that become complete together.

    Attributes:
        layer: the block they belong to; None for those outside of blocks.
        tensors: what is filled.
        left: jobs that are not done yet, of those known so far.
        is_whole: all of its jobs are known.
    """

    layer: int | None
    tensors: Sequence[PlannedTensor]
    at: int = 0
    left: int = 0
    is_whole: bool = False


def in_layers(tensors: Sequence[PlannedTensor]) -> list[Group]:
    """Tensors by block: those of block 0, 1, … and last those outside of blocks (None).

    Files may hold them in any order (``h.0``, ``h.1``, ``h.10``, …).
    """
    layers: dict[int | None, list[PlannedTensor]] = {}
    for tensor in tensors:
        layers.setdefault(tensor.layer, []).append(tensor)
    order = sorted(layers, key=lambda layer: (layer is None, layer or 0))
    return [Group(layer, layers[layer]) for layer in order]


# Makes the memory of a target, or gives the tensor that is overwritten.
Memory: TypeAlias = Callable[[PlannedTensor], torch.Tensor]
# Is entered while the memory of a group is made.
Opening: TypeAlias = Callable[[Sequence[PlannedTensor]], AbstractContextManager[None]]


class Counter:
    """Bytes done, counted by the workers and told from the calling thread.

    Args:
        total: bytes in all.
        progress: called as progress(done_bytes, total_bytes, stored_name).
    """

    def __init__(self, total: int, progress: Progress | None = None) -> None:
        self.done = 0
        self.unwanted = 0
        self._total = total
        self._progress = progress
        self._name = ""
        self._told = -1
        self._lock = threading.Lock()

    def add(self, count: int, name: str, unwanted: int = 0) -> None:
        """Count bytes read, ``unwanted`` of them only since they lie between others."""
        with self._lock:
            self.done += count
            self.unwanted += unwanted
            self._name = name

    def tell(self) -> None:
        if self._progress is not None and self._total and self.done != self._told:
            self._told = self.done
            self._progress(min(self.done, self._total), self._total, self._name)


class GroupFeed:
    """Gives memory to groups in turn and hands them on when they are complete.

    ``jobs``, ``admit`` and ``done`` are for the workers, ``open_next`` and ``completed`` for the
    calling thread.

    Args:
        plan: what goes where.
        groups: in the order in which they are filled.
        memory: of a target that workers fill.
        counter: told of every job that is done.
        opening: entered while a group's memory is made.
        batch_bytes: see Lane.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[Group],
        memory: Memory,
        counter: Counter,
        *,
        opening: Opening = lambda _: nullcontext(),
        batch_bytes: int = 0,
    ) -> None:
        self._plan = plan
        self._opening = opening
        self._batch_bytes = batch_bytes
        self._groups = groups
        self._memory = memory
        self._counter = counter
        self._group_of: list[Group] = []
        self._numbers: dict[str, int] = {}
        self.destinations: list[Destination] = []
        self.by_name: dict[str, Destination] = {}
        for at, group in enumerate(groups):
            group.at, group.is_whole = at, True
            for tensor in group.tensors:
                if tensor.is_moved:
                    group.is_whole = False
                    self._numbers[tensor.name] = len(self.destinations)
                    self._group_of.append(group)
                    destination = Destination(NO_MEMORY, tensor.device, tensor.is_new)
                    self.destinations.append(destination)
                    self.by_name[tensor.name] = destination
        self._opened = 0
        self._handed_on = 0
        self._stopped = False
        self._changed = threading.Condition()

    def jobs(self) -> Iterator[Job]:
        """All jobs, group by group, inside a group in the order of the files."""
        stored, options, most = self._plan.stored, self._plan.options, self._batch_bytes
        if most:
            chunk_bytes, staging_bytes = options.chunk_bytes, options.staging_bytes
            options = replace(
                options,
                chunk_bytes=min(chunk_bytes, most),
                staging_bytes=min(staging_bytes, max(most // 2, 1)),
            )
        order = {name: at for at, name in enumerate(stored)}
        for group in self._groups:
            moved = [t for t in group.tensors if t.is_moved]
            jobs = jobs_of(moved, stored, order, self._numbers, options)
            for job in joined(jobs, most, self._device_of) if most else jobs:
                with self._changed:
                    group.left += 1
                yield job
            with self._changed:
                group.is_whole = True

    def _device_of(self, job: Job) -> str | None:
        """The one device that a job writes to, unless that is the host."""
        device = self.destinations[job.target].device
        for part in job.chunks[0].parts[1:]:
            if self.destinations[part.target].device != device:
                return None
        return None if on_host(device) else device

    def admit(self, job: Job) -> bool:
        """Wait until the job's group has memory; False if there is no point any more."""
        group = self._group_of[job.target]
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or group.at < self._opened)
            return not self._stopped

    def done(self, job: Job) -> bool:
        """Count a job; True if its group may be complete."""
        self._counter.add(job.nbytes, job.spec.name, job.unwanted_bytes)
        group = self._group_of[job.target]
        with self._changed:
            group.left -= 1
            return group.left == 0

    def stop(self) -> None:
        """No worker is to wait any longer."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def open_next(self, count: int = 1) -> None:
        """Give memory to the next groups, as far as there are any."""
        for group in self._groups[self._opened : self._opened + count]:
            moved = [t for t in group.tensors if t.is_moved]
            with self._opening(moved):
                for tensor in moved:
                    self.by_name[tensor.name].tensor = self._memory(tensor)
            with self._changed:
                self._opened += 1
                self._changed.notify_all()

    def completed(self) -> Iterator[Group]:
        """The groups that have become complete, in order; each is given up before the next one.

        The caller takes its tensors before it asks for the next.
        """
        while self._handed_on < self._opened:
            group = self._groups[self._handed_on]
            with self._changed:
                if group.left or not group.is_whole:
                    return
            yield group
            self._handed_on += 1
            self.open_next()
