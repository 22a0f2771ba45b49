"""The lane of every device but the CPU: read into a ring, copy, cast and turn from staging."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from streamload.core.dtypes import BY_NAME
from streamload.engine.casts import can_overflow, saturated, saturates
from streamload.engine.chunks import Chunk, Part
from streamload.engine.lanes.base import Destination, Destinations
from streamload.engine.lanes.cpu import refuse_odd_bools
from streamload.engine.lanes.ring import RING_SLOTS, SLOT_BYTES, DeviceOps, Event, Ring, Stream
from streamload.planning.records import PlannedTensor
from streamload.sources.blocks import bytes_of, torch_dtype
from streamload.sources.wrapping.reader import Reader

# torch has no isfinite() for the 8-bit floats.
_FINITE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class DeviceLane:
    """New tensors on a device; host memory is the ring's, whatever the model.

    Host to device copies go through one stream, casts and transpositions through another, so
    that the bus works while the device does. Staging on the device is as many blocks as the ring
    has slots.

    Args:
        ops: the device.
        slots: buffers in the ring.
        slot_bytes: size of each; at least one element.
    """

    def __init__(
        self, ops: DeviceOps, *, slots: int = RING_SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self.ops = ops
        self.slot_bytes = slot_bytes
        self.copying = ops.stream()
        self.computing = ops.stream()
        self.ring = Ring(slots, lambda: ops.host(slot_bytes))
        self.panels = Ring(slots, lambda: ops.scratch(0, self.copying))
        # Memory that the current stream gave out must not be written before the current stream
        # is where it was then: the allocator hands out what earlier work there still reads.
        self.fresh: Event = ops.record(ops.current())
        self._lost: dict[int, tuple[Destination, Tensor]] = {}
        self._lock = threading.Lock()
        self._marks = ops.marks()

    def allocate(self, tensor: PlannedTensor) -> Tensor:
        made = self.ops.allocate(tensor)
        self.fresh = self.ops.record(self.ops.current())
        return made

    def worker(self) -> DeviceWorker:
        return DeviceWorker(self)

    def finish(self) -> None:
        """The current stream waits for all that was queued; the host does not."""
        current = self.ops.current()
        for stream in (self.copying, self.computing):
            self.ops.wait(current, self.ops.record(stream))

    def room(self) -> Mapping[str, int]:
        free = self.ops.free_bytes()
        return {} if free is None else {self.ops.device: free}

    def peak_bytes(self) -> int:
        held, high = self._marks
        now_held, now_high = self.ops.marks()
        return max((now_high if now_high > high else now_held) - held, 0)

    def lost_counter(self, destination: Destination) -> Tensor:
        """Where the values of ``destination`` that overflow are counted, on the device."""
        with self._lock:
            if id(destination) not in self._lost:
                self._lost[id(destination)] = destination, self.ops.counter(self.computing)
            return self._lost[id(destination)][1]

    def settle(self) -> None:
        """Wait for all that was queued, then add up what overflowed."""
        for stream in (self.copying, self.computing):
            self.ops.synchronize(self.ops.record(stream))
        with self._lock:
            counted, self._lost = self._lost, {}
            for destination, lost in counted.values():
                destination.overflows += int(lost)


class DeviceWorker:
    """One reader's way through the lane's shared ring and staging."""

    def __init__(self, lane: DeviceLane) -> None:
        self._lane = lane

    def carry(
        self, chunk: Chunk, stored: torch.dtype, read: Reader, destinations: Destinations
    ) -> None:
        """See LaneWorker; what it queued may still be under way when it returns."""
        tensor = destinations[chunk.parts[0].target].tensor
        if chunk.direct and tensor.dtype == stored:
            count = chunk.stop - chunk.start
            offset = tensor.storage_offset() + chunk.parts[0].target_offset
            self._send(chunk, read, torch.as_strided(tensor, (count,), (1,), offset))
        else:
            self._carry_panel(chunk, stored, read, destinations)

    def close(self) -> None:
        """Wait for what is under way: the ring's memory may go afterwards."""
        self._lane.settle()

    def _carry_panel(
        self, chunk: Chunk, stored: torch.dtype, read: Reader, destinations: Destinations
    ) -> None:
        # Always the panel before a slot, or two workers could wait for each other.
        lane, ops = self._lane, self._lane.ops
        panel = lane.panels.take()
        try:
            if panel.event is not None:
                ops.wait(lane.copying, panel.event)
            nbytes = (chunk.stop - chunk.start) * stored.itemsize
            if panel.buffer.numel() < nbytes:
                panel.buffer = panel.buffer[:0]  # let the old memory go first
                panel.buffer = ops.scratch(nbytes, lane.copying)
            raw = panel.buffer[:nbytes].view(stored)
            self._send(chunk, read, raw)
            ops.wait(lane.computing, ops.record(lane.copying))
            for part in chunk.parts:
                destination = destinations[part.target]
                narrows = can_overflow(stored, destination.tensor.dtype)
                lost = lane.lost_counter(destination) if narrows else None
                ops.scatter(raw, part, destination.tensor, lost, lane.computing)
        finally:
            panel.event = ops.record(lane.computing)
            lane.panels.give(panel)

    def _send(self, chunk: Chunk, read: Reader, target: Tensor) -> None:
        """Stored elements of the block to ``target``, flat and of their dtype, slot by slot."""
        lane, ops = self._lane, self._lane.ops
        dtype = target.dtype
        most = lane.slot_bytes // dtype.itemsize
        step = max(most // read.quantum * read.quantum, min(most, read.quantum))
        for start in range(chunk.start, chunk.stop, step):
            stop = min(start + step, chunk.stop)
            slot = lane.ring.take()
            try:
                if slot.event is not None:
                    ops.synchronize(slot.event)
                values = slot.buffer[: (stop - start) * dtype.itemsize].view(dtype)
                read(start, stop, bytes_of(values))
                if dtype == torch.bool:
                    refuse_odd_bools(values)
                ops.wait(lane.copying, lane.fresh)
                ops.copy(target[start - chunk.start : stop - chunk.start], values, lane.copying)
                slot.event = ops.record(lane.copying)
            finally:
                lane.ring.give(slot)


def scatter(source: Tensor, part: Part, target: Tensor, lost: Tensor | None) -> None:
    """Write one part of a block to its place, casting; overflows are added to ``lost``.

    Args:
        source: the block's elements, flat, as stored.
        part: which of them go where.
        target: the whole destination.
        lost: int64 scalar on the target's device.
    """
    picked = torch.as_strided(
        source, part.shape, part.source_strides, source.storage_offset() + part.source_offset
    )
    offset = target.storage_offset() + part.target_offset
    view = torch.as_strided(target, part.shape, part.target_strides, offset)
    view.copy_(picked)
    if lost is None:
        return
    if saturates(view.dtype):
        lost += saturated(picked, view.dtype).sum().to(lost.device)
    else:
        # No look at the values from the host, which would have to wait for them.
        lost += (_finite(picked) - _finite(view).to(picked.device)).to(lost.device)


def _finite(values: Tensor) -> Tensor:
    return torch.isfinite(values if values.dtype in _FINITE else values.float()).sum()


class PlainOps:
    """Any device torch knows, by copies that the host waits for (MPS, XPU and others).

    Staging is host memory, so that the device needs to know the target's dtype only.

    Args:
        device: as torch names it.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def free_bytes(self) -> int | None:
        return None

    def marks(self) -> tuple[int, int]:
        return 0, 0

    def host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def scratch(self, nbytes: int, stream: Stream) -> Tensor:
        del stream
        return self.host(nbytes)

    def counter(self, stream: Stream) -> Tensor:
        del stream  # on the host, where the staging is
        return torch.zeros((), dtype=torch.int64, device="cpu")

    def allocate(self, tensor: PlannedTensor) -> Tensor:
        return empty_on(tensor, self.device)

    def stream(self) -> Stream:
        """There is but one order."""

    def current(self) -> Stream:
        """There is but one order."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        del stream
        target.copy_(source)

    def scatter(
        self, source: Tensor, part: Part, target: Tensor, lost: Tensor | None, stream: Stream
    ) -> None:
        del stream
        scatter(source, part, target, lost)

    def record(self, stream: Stream) -> Event:
        """Nothing is under way."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing is under way."""

    def synchronize(self, event: Event) -> None:
        """Nothing is under way."""


def empty_on(tensor: PlannedTensor, device: str) -> Tensor:
    """Memory for a planned tensor, its values not set."""
    assert BY_NAME[tensor.dtype].torch_name is not None, "planning refuses such dtypes"
    return torch.empty_strided(
        tensor.shape, tensor.strides, dtype=torch_dtype(tensor.dtype), device=device
    )
