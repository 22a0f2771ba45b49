"""Buffers that go round between readers and a device, and what a device must be able to do.

The order of things is the whole point here: a host buffer may be filled again only when the copy
out of it is over, a staging buffer on the device only when what was made of it is written, and
fresh memory only when what its last owner queued is done. All of it is said with events;
``tests/engine/test_waits.py`` takes each wait out in turn, on a device that runs its work late and
out of order, and finds that it is missed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from streamload.engine.chunks import Part
from streamload.planning.records import PlannedTensor

# What the operations hand out and take back; torch's own classes on CUDA.
Stream: TypeAlias = Any
Event: TypeAlias = Any


class Move(NamedTuple):
    """One strided copy with a cast.

    Attributes:
        source: a flat view of the whole staging buffer, in the stored dtype.
        start: where in it the part's block begins, in elements.
        part: which elements go where.
        target: the whole destination.
        lost: an int64 scalar where overflows are counted; None where the cast cannot overflow.
    """

    source: Tensor
    start: int
    part: Part
    target: Tensor
    lost: Tensor | None


class DeviceOps(Protocol):
    """The few things a lane does with a device; called from several threads.

    Work on one stream runs in the order it was given; streams know nothing of each other but
    through events.

    Attributes:
        device: as ``PlannedTensor.device`` names it.
        stages: casts and transpositions run on the device, out of staging there. If not, they go
            straight from host memory to their place.
    """

    device: str
    stages: bool

    def bind(self) -> None:
        """The calling thread, one of the lane's own, is about to work with this device."""

    def free_bytes(self) -> int | None:
        """What can still be allocated; None where that is host memory, or not told."""

    def marks(self) -> tuple[int, int]:
        """Bytes allocated now, and the most there ever were."""

    def host(self, nbytes: int) -> Tensor:
        """Host memory, uint8, that copies can be made from while the host goes on.

        Raises:
            RuntimeError: the system gives no such memory; ``pageable`` may still do.
        """

    def pageable(self, nbytes: int) -> Tensor:
        """Ordinary host memory, uint8; a copy out of it may hold up the host."""

    def scratch(self, nbytes: int, stream: Stream) -> Tensor:
        """Staging memory, uint8, first used on ``stream``, and to be let go in its order."""

    def counters(self, count: int, stream: Stream) -> Tensor:
        """int64 [count], zeros once what is on ``stream`` so far is done."""

    def reserve(self, sizes: Sequence[int]) -> None:
        """Tensors of so many bytes each are about to be allocated: only a hint."""

    def allocate(self, tensor: PlannedTensor) -> Tensor:
        """A new tensor, ready for the caller's current stream."""

    def streams(self) -> tuple[Stream, Stream]:
        """Two streams beside the caller's, for copies and for computing; the same every time."""

    def current(self) -> Stream:
        """The calling thread's current stream."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Queue a copy of equal dtypes and shapes, host to device."""

    def scatter(self, moves: Sequence[Move], stream: Stream) -> None:
        """Queue strided copies with casts."""

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
