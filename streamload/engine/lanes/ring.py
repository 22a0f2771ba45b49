"""Buffers that go round between readers and a device, and what a device must be able to do.

The order of things is the whole point here: a host buffer may be filled again only when the copy
out of it is over, a staging buffer on the device only when what was made of it is written. Both
are said with events; ``tests/engine/test_ring.py`` runs all of it on a device that runs its work
late and out of order, and that raises where an event was not waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from streamload.engine.chunks import Part
from streamload.planning.needed_memory import RING_BYTES
from streamload.planning.records import PlannedTensor

# Whatever the model: four buffers keep several reads and a copy under way at once.
RING_SLOTS = 4
SLOT_BYTES = RING_BYTES // RING_SLOTS

# What the operations hand out and take back; torch's own classes on CUDA.
Stream: TypeAlias = Any
Event: TypeAlias = Any


class DeviceOps(Protocol):
    """The few things a lane does with a device; called from several threads.

    Work on one stream runs in the order it was given; streams know nothing of each other but
    through events.

    Attributes:
        device: as ``PlannedTensor.device`` names it.
    """

    device: str

    def free_bytes(self) -> int | None:
        """What can still be allocated; None where that is host memory, or not told."""

    def marks(self) -> tuple[int, int]:
        """Bytes allocated now, and the most there ever were."""

    def host(self, nbytes: int) -> Tensor:
        """Host memory, uint8, that copies can be made from while the host goes on."""

    def scratch(self, nbytes: int, stream: Stream) -> Tensor:
        """Staging memory, uint8, first used on ``stream``."""

    def counter(self, stream: Stream) -> Tensor:
        """An int64 scalar, zero once what is on ``stream`` so far is done."""

    def allocate(self, tensor: PlannedTensor) -> Tensor:
        """A new tensor, ready for the caller's current stream."""

    def stream(self) -> Stream:
        """A new stream beside the caller's."""

    def current(self) -> Stream:
        """The calling thread's current stream."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Queue a copy of equal dtypes and shapes, host to device; returns at once."""

    def scatter(
        self, source: Tensor, part: Part, target: Tensor, lost: Tensor | None, stream: Stream
    ) -> None:
        """Queue one strided copy with a cast; values that overflow are added to ``lost``."""

    def record(self, stream: Stream) -> Event:
        """An event that is reached when everything on ``stream`` so far is done."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What comes on ``stream`` from now on waits for ``event``; the host does not."""

    def synchronize(self, event: Event) -> None:
        """The host waits for ``event``."""


@dataclass(slots=True)
class Slot:
    """One buffer and the event after which it may be used again (None: at once)."""

    buffer: Tensor
    event: Event | None = None


class Ring:
    """A bounded number of slots that go round, the longest free first; made when first taken.

    A slot belongs to one thread at a time.

    Args:
        count: how many.
        make: gives a slot's first buffer.
    """

    def __init__(self, count: int, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._unmade = count
        self._free: list[Slot] = []
        self._changed = threading.Condition()

    def take(self) -> Slot:
        """A slot of the caller's own until ``give``; its event still has to be waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._unmade)
            # A free slot may have a copy under way: a new one can be filled meanwhile.
            if not self._unmade:
                return self._free.pop(0)
            self._unmade -= 1
        try:
            return Slot(self._make())
        except BaseException:
            with self._changed:
                self._unmade += 1
                self._changed.notify()
            raise

    def give(self, slot: Slot) -> None:
        """Back into the ring; ``slot.event`` says when it may be used again."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()
