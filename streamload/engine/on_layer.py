"""``on_layer``: blocks are made one after another, handed out complete, and maybe replaced.

At most ``AHEAD`` blocks have memory at once beside those already handed out: the workers wait
until the calling thread, which runs the caller's function, has come so far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import nn

from streamload.core.errors import StreamloadError
from streamload.engine.jobs import Job, jobs_of
from streamload.engine.lanes.base import Destination, Lane
from streamload.planning.records import Plan, PlannedTensor

__all__ = ["AHEAD", "LayerFeed", "OnLayer", "Replacements", "in_blocks"]

# on_layer(layer, tensors) → None, or tensor name → tensor and module name → module.
OnLayer: TypeAlias = Callable[[int | None, dict[str, torch.Tensor]], object]

# One is handed out while the next is read.
AHEAD = 2


@dataclass
class Replacements:
    """What on_layer gave for what it got.

    Attributes:
        tensors: by target name: those kept and those given in their place.
        modules: by module name, to be swapped in.
        given: names of the tensors that are not the loaded ones.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)


def in_blocks(
    tensors: Sequence[PlannedTensor],
) -> list[tuple[int | None, tuple[PlannedTensor, ...]]]:
    """Tensors by block: those of block 0, 1, … and last those outside of blocks (None).

    Files may hold them in any order (``h.0``, ``h.1``, ``h.10``, …).
    """
    groups: dict[int | None, list[PlannedTensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.layer, []).append(tensor)
    inside = sorted(layer for layer in groups if layer is not None)
    order: list[int | None] = [*inside, *([None] if None in groups else [])]
    return [(layer, tuple(groups[layer])) for layer in order]


@dataclass
class _Group:
    """One block on its way; ``left`` counts its jobs and is None before they are known."""

    at: int
    layer: int | None
    tensors: tuple[PlannedTensor, ...]
    left: int | None = None


class LayerFeed:
    """Gives memory to blocks in turn and hands them to ``on_layer`` when they are complete.

    ``jobs``, ``admit`` and ``done`` are for the workers, ``start`` and ``deliver`` for the
    calling thread.

    Args:
        plan: what goes where.
        tensors: new targets.
        lane: allocates them.
        make: fills targets that no worker fills (mapped, or with arithmetic); gets the planned
            tensor and its memory, or None for a mapped one, and returns the tensor.
        on_layer: the caller's function.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Sequence[PlannedTensor],
        lane: Lane,
        make: Callable[[PlannedTensor, torch.Tensor | None], torch.Tensor],
        on_layer: OnLayer,
    ) -> None:
        self._plan = plan
        self._lane = lane
        self._make = make
        self._on_layer = on_layer
        self._groups = [_Group(at, *group) for at, group in enumerate(in_blocks(tensors))]
        self.moved = [t for g in self._groups for t in g.tensors if _is_moved(t)]
        self._numbers = {t.name: at for at, t in enumerate(self.moved)}
        self.destinations = [Destination(_nothing(), t.device, is_fresh=True) for t in self.moved]
        self._group_of = {t.name: g for g in self._groups for t in g.tensors}
        self._opened = 0
        self._delivered = 0
        self._stopped = False
        self._changed = threading.Condition()
        self.results = Replacements()

    def jobs(self) -> Iterator[Job]:
        """All jobs, block by block, inside a block in the order of the files."""
        place = {name: at for at, name in enumerate(self._plan.stored)}
        for group in self._groups:
            moved = [t for t in group.tensors if _is_moved(t)]
            names = sorted({m.stored_name for t in moved for m in t.copies}, key=place.__getitem__)
            part = replace(self._plan, stored={n: self._plan.stored[n] for n in names})
            jobs = list(jobs_of(part, moved, self._numbers))
            with self._changed:
                group.left = len(jobs)
            yield from jobs

    def admit(self, job: Job) -> bool:
        """Wait until the job's block has memory; False if there is no point any more."""
        group = self._group(job)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or group.at < self._opened)
            return not self._stopped

    def done(self, job: Job) -> bool:
        """Count a job; True if its block is complete."""
        group = self._group(job)
        with self._changed:
            assert group.left, "a job is done once"
            group.left -= 1
            return group.left == 0

    def stop(self) -> None:
        """No worker is to wait any longer."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def start(self) -> None:
        """Give memory to the first blocks."""
        while self._opened < min(AHEAD, len(self._groups)):
            self._open()

    def deliver(self) -> None:
        """Hand out what is complete, in order.

        Raises:
            Whatever on_layer raises; StreamloadError: it returned what has no place.
        """
        while self._delivered < len(self._groups):
            group = self._groups[self._delivered]
            with self._changed:
                if group.left != 0 or self._delivered == self._opened:
                    return
            self._hand_out(group)
            self._delivered += 1
            if self._opened < len(self._groups):
                self._open()

    def _group(self, job: Job) -> _Group:
        return self._group_of[self.moved[job.chunks[0].parts[0].target].name]

    def _open(self) -> None:
        group = self._groups[self._opened]
        for tensor in group.tensors:
            if _is_moved(tensor):
                self.destinations[self._numbers[tensor.name]].tensor = self._lane.allocate(tensor)
        with self._changed:
            self._opened += 1
            self._changed.notify_all()

    def _hand_out(self, group: _Group) -> None:
        made: dict[str, torch.Tensor] = {}
        for tensor in group.tensors:
            if _is_moved(tensor):
                destination = self.destinations[self._numbers[tensor.name]]
                made[tensor.name], destination.tensor = destination.tensor, _nothing()
            else:
                new = None if tensor.mapped else self._lane.allocate(tensor)
                made[tensor.name] = self._make(tensor, new)
        self._lane.finish()
        returned = self._on_layer(group.layer, dict(made))
        self._settle(group, made, returned)

    def _settle(self, group: _Group, made: dict[str, torch.Tensor], returned: object) -> None:
        """Enter what is kept and what came instead; the rest of ``made`` is let go."""
        first = {n: t.name for t in group.tensors for n in (t.name, *t.aliases)}
        for name, value in _as_items(group.layer, returned):
            if isinstance(value, nn.Module) and name not in first:
                self.results.modules[name] = value
            elif isinstance(value, torch.Tensor) and name in first:
                made[first[name]] = value
                self.results.given.add(first[name])
            else:
                what = "a tensor of this block" if name in first else "a module to swap"
                kind = type(value).__name__
                raise StreamloadError(
                    f"on_layer({group.layer}) returned {name!r}: {kind}, which is not {what}: "
                    "give a tensor for one of the names it got, or a torch.nn.Module for a "
                    "module's name"
                )
        swapped = tuple(f"{name}." for name in self.results.modules)
        for tensor in group.tensors:
            names = (tensor.name, *tensor.aliases)
            if not all(name.startswith(swapped) for name in names):
                self.results.tensors[tensor.name] = made[tensor.name]


def _is_moved(tensor: PlannedTensor) -> bool:
    return tensor.mapped is None and not tensor.reduces


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _as_items(layer: int | None, returned: object) -> list[tuple[str, object]]:
    if returned is None:
        return []
    if not isinstance(returned, Mapping):
        raise StreamloadError(
            f"on_layer({layer}) must return None or a dict of replacements, not "
            f"{type(returned).__name__}"
        )
    return list(returned.items())
