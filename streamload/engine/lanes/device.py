"""The lane of every device but the CPU: read into a ring, copy, cast and turn from staging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from streamload.core.errors import CheckpointError, ReadError
from streamload.core.options import SLOT_BYTES
from streamload.core.specs import TensorSpec
from streamload.decoding.scratch import Scratch
from streamload.engine.casts import can_overflow
from streamload.engine.chunks import Chunk
from streamload.engine.jobs import Job
from streamload.engine.lanes.base import NO_MEMORY, Destinations
from streamload.engine.lanes.cpu import refuse_odd_bools
from streamload.engine.lanes.moves import OverflowCounts
from streamload.engine.lanes.ring import DeviceOps, Move, Ring, Slot
from streamload.planning.needed_memory import PANELS
from streamload.planning.records import PlannedTensor
from streamload.sources.base import Source
from streamload.sources.blocks import bytes_of, torch_dtype
from streamload.sources.wrapping.reader import Reader


class Piece(NamedTuple):
    """A chunk whose bytes lie ``at`` so many bytes from the start of what is read at once."""

    chunk: Chunk
    stored: torch.dtype
    at: int = 0
    spec: TensorSpec | None = None


# Fills a buffer with all bytes of some pieces.
Fill: TypeAlias = Callable[[memoryview], None]


class DeviceLane:
    """New tensors on a device; host memory is the ring's, whatever the model.

    Host to device copies go through one stream, casts and transpositions through another, so
    that the bus works while the device does. A reader holds a slot of the ring while it reads, and
    a panel of staging only while it queues: few panels do for any number of readers.

    Args:
        ops: the device.
        slots: buffers in the ring.
        slot_bytes: size of each; a multiple of 16.
        panels: staging buffers on the device, of the same size.
    """

    def __init__(
        self, ops: DeviceOps, *, slots: int, slot_bytes: int = SLOT_BYTES, panels: int = PANELS
    ) -> None:
        self.ops = ops
        self.batch_bytes = slot_bytes
        self.copying, self.computing = ops.streams()
        # Nothing here refers back to the lane: its memory goes with it, without a collection.
        self._host = _HostMemory(ops, slot_bytes)
        self.ring = Ring(slots, self._host)
        self.panels = Ring(panels, lambda: NO_MEMORY)
        # For rows that are longer than a slot: one at a time, through many slots.
        self.wide = Ring(1, lambda: NO_MEMORY)
        self.counts = OverflowCounts(ops, self.computing)
        self._marks = ops.marks()

    def allocate(self, tensor: PlannedTensor) -> Tensor:
        return self.ops.allocate(tensor)

    @contextmanager
    def opening(self, tensors: Sequence[PlannedTensor]) -> Iterator[None]:
        """See Lane.

        The allocator hands out memory that earlier work on the caller's stream still reads, and
        what is overwritten in place may be in use there: the lane's streams wait for that.
        """
        self.ops.reserve([t.nbytes for t in tensors if t.is_new])
        yield
        self.ops.wait(self.copying, self.ops.record(self.ops.current()))

    def worker(self) -> DeviceWorker:
        return DeviceWorker(self)

    def settle(self) -> None:
        """Wait for all that was queued, then add up what overflowed."""
        for stream in (self.copying, self.computing):
            self.ops.synchronize(self.ops.record(stream))
        self.counts.add_up()

    def finish(self) -> None:
        """The current stream waits for all that was queued; the host does not."""
        current = self.ops.current()
        for stream in (self.copying, self.computing):
            self.ops.wait(current, self.ops.record(stream))

    def notices(self) -> tuple[str, ...]:
        return tuple(self._host.notices)

    def room(self) -> Mapping[str, int]:
        free = self.ops.free_bytes()
        return {} if free is None else {self.ops.device: free}

    def peak_bytes(self) -> int:
        held, high = self._marks
        now_held, now_high = self.ops.marks()
        return max((now_high if now_high > high else now_held) - held, 0)


class _HostMemory:
    """Makes the slots of a ring: page-locked as far as the system gives such memory."""

    def __init__(self, ops: DeviceOps, nbytes: int) -> None:
        self._ops = ops
        self._nbytes = nbytes
        self.notices: dict[str, None] = {}

    def __call__(self) -> Tensor:
        try:
            return self._ops.host(self._nbytes)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        made = self._ops.pageable(self._nbytes)
        text = "the system gave no page-locked memory for reading"
        self.notices[f"{text}, so copies to {self._ops.device} are slower: {reason}"] = None
        return made


class DeviceWorker:
    """One reader's way through the lane's shared ring and staging.

    Never take a slot while holding a panel of ``lane.panels``: readers wait for these with a slot
    in their hands.
    """

    def __init__(self, lane: DeviceLane) -> None:
        self._lane = lane
        self._ops = lane.ops
        self.scratch = Scratch()

    def carry(
        self, chunk: Chunk, stored: torch.dtype, read: Reader, destinations: Destinations
    ) -> None:
        """See LaneWorker; what it queued may still be under way when it returns."""
        self._ops.bind()
        tensor = destinations[chunk.parts[0].target].tensor
        nbytes = (chunk.stop - chunk.start) * stored.itemsize
        if chunk.direct and tensor.dtype == stored:
            count = chunk.stop - chunk.start
            offset = tensor.storage_offset() + chunk.parts[0].target_offset
            self._send(chunk, read, torch.as_strided(tensor, (count,), (1,), offset))
        elif nbytes <= self._lane.batch_bytes:
            piece = Piece(chunk, stored)
            fill = partial(read, chunk.start, chunk.stop)
            self._stage([piece], nbytes, fill, destinations)
        else:
            self._carry_wide(chunk, stored, read, destinations)

    def carry_joined(self, job: Job, source: Source, destinations: Destinations) -> None:
        """See LaneWorker: one read, one copy."""
        self._ops.bind()
        run = job.run
        assert run is not None, "only reads from files are joined"
        dtypes: dict[str, torch.dtype] = {}
        pieces = []
        for part in job.parts:
            name = part.spec.dtype
            stored = dtypes.get(name) or dtypes.setdefault(name, torch_dtype(name))
            at = part.extents[0].offset - run.offset
            pieces.append(Piece(part.chunks[0], stored, at, part.spec))
        self._stage(pieces, run.nbytes, partial(_read_joined, job, source), destinations)

    def close(self) -> None:
        """All of it is the lane's."""

    def _stage(
        self, pieces: Sequence[Piece], nbytes: int, fill: Fill, destinations: Destinations
    ) -> None:
        """Read pieces that fit a slot, copy them at once, and write them from there."""
        lane, ops = self._lane, self._ops
        slot = lane.ring.take()
        try:
            self._fill(slot, nbytes, fill)
            _check_bools(pieces, slot.buffer)
            if not ops.stages:
                ops.scatter(self._moves(pieces, slot.buffer, destinations), lane.computing)
                return
            panel = lane.panels.take()
            try:
                self._make_ready(panel, nbytes)
                ops.copy(panel.buffer[:nbytes], slot.buffer[:nbytes], lane.copying)
                slot.event = ops.record(lane.copying)
                ops.wait(lane.computing, slot.event)
                ops.scatter(self._moves(pieces, panel.buffer, destinations), lane.computing)
            finally:
                panel.event = ops.record(lane.computing)
                lane.panels.give(panel)
        finally:
            lane.ring.give(slot)

    def _carry_wide(
        self, chunk: Chunk, stored: torch.dtype, read: Reader, destinations: Destinations
    ) -> None:
        lane, ops = self._lane, self._ops
        panel = lane.wide.take()
        try:
            count = chunk.stop - chunk.start
            self._make_ready(panel, count * stored.itemsize)
            self._send(chunk, read, panel.buffer.view(stored)[:count])
            ops.wait(lane.computing, ops.record(lane.copying))
            moves = self._moves([Piece(chunk, stored)], panel.buffer, destinations)
            ops.scatter(moves, lane.computing)
        finally:
            panel.event = ops.record(lane.computing)
            lane.wide.give(panel)

    def _send(self, chunk: Chunk, read: Reader, target: Tensor) -> None:
        """Stored elements of the chunk to ``target``, flat and of their dtype, slot by slot."""
        lane, ops = self._lane, self._ops
        size = target.dtype.itemsize
        most = lane.batch_bytes // size
        step = max(most // read.quantum * read.quantum, min(most, read.quantum))
        for start in range(chunk.start, chunk.stop, step):
            stop = min(start + step, chunk.stop)
            slot = lane.ring.take()
            try:
                nbytes = (stop - start) * size
                self._fill(slot, nbytes, partial(read, start, stop))
                values = slot.buffer[:nbytes].view(target.dtype)
                if target.dtype == torch.bool:
                    refuse_odd_bools(values)
                ops.copy(target[start - chunk.start : stop - chunk.start], values, lane.copying)
                slot.event = ops.record(lane.copying)
            finally:
                lane.ring.give(slot)

    def _fill(self, slot: Slot, nbytes: int, fill: Fill) -> None:
        if slot.event is not None:
            self._ops.synchronize(slot.event)
        fill(bytes_of(slot.buffer)[:nbytes])

    def _make_ready(self, panel: Slot, nbytes: int) -> None:
        """A panel large enough, which copies may be made to from now on."""
        lane, ops = self._lane, self._ops
        if panel.event is not None:
            ops.wait(lane.copying, panel.event)
        if panel.buffer.numel() < nbytes:
            panel.buffer = NO_MEMORY  # let the old memory go first, in the order of its stream
            panel.buffer = ops.scratch(max(nbytes + -nbytes % 16, lane.batch_bytes), lane.copying)

    def _moves(
        self, pieces: Sequence[Piece], buffer: Tensor, destinations: Destinations
    ) -> list[Move]:
        views: dict[torch.dtype, Tensor] = {}
        moves = []
        for chunk, stored, at, _ in pieces:
            source = views.get(stored)
            if source is None:
                source = views[stored] = buffer.view(stored)
            for part in chunk.parts:
                destination = destinations[part.target]
                tensor = destination.tensor
                narrows = can_overflow(stored, tensor.dtype)
                lost = self._lane.counts.of(destination) if narrows else None
                moves.append(Move(source, at // stored.itemsize, part, tensor, lost))
        return moves


def _check_bools(pieces: Sequence[Piece], buffer: Tensor) -> None:
    for chunk, stored, at, spec in pieces:
        if stored != torch.bool:
            continue
        try:
            refuse_odd_bools(buffer[at : at + chunk.stop - chunk.start])
        except CheckpointError as error:
            if spec is None:  # the caller knows
                raise
            raise CheckpointError(str(error), path=spec.file, tensor=spec.name) from error


def _read_joined(job: Job, source: Source, buffer: memoryview) -> None:
    """One read; if it fails, tensor by tensor, so that the error names the right one."""
    run = job.extents[0]
    try:
        source.read_into(run, buffer, tensor=job.spec.name)
    except ReadError:
        for part in job.parts:
            extent = part.extents[0]
            at = extent.offset - run.offset
            source.read_into(extent, buffer[at : at + extent.nbytes], tensor=part.spec.name)
