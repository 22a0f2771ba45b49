"""The CPU lane: blocks are read into one reused buffer a worker and cast into the destination."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from streamload.core.errors import CheckpointError
from streamload.core.specs import numel
from streamload.decoding.scratch import Buffer, Scratch
from streamload.engine.casts import can_overflow, count_overflows, may_overflow, overflowed
from streamload.engine.chunks import Chunk, Part
from streamload.engine.jobs import Job
from streamload.engine.lanes.base import Destination
from streamload.engine.lanes.turning import columns_to_turn, parts_of, tiles
from streamload.planning.records import PlannedTensor
from streamload.sources.base import Source
from streamload.sources.blocks import torch_dtype
from streamload.sources.wrapping.reader import Reader
from streamload.system.pages import are_offered, empty_pages, populate

# Held while a destination's count is raised: several workers write one tensor.
_COUNTING = threading.Lock()


def memory_at(tensor: torch.Tensor, offset: int, count: int) -> memoryview:
    """The writable bytes of ``count`` elements from ``offset``; valid while the tensor lives."""
    size = tensor.element_size()
    start = tensor.data_ptr() + offset * size
    return memoryview((ctypes.c_char * (count * size)).from_address(start)).cast("B")


class CpuLane:
    """New tensors in ordinary memory, written by several threads.

    Args:
        chunk_bytes: how much one read brings; a worker's buffer is about as large.
    """

    # Small reads out of the page cache cost a system call each, no more.
    batch_bytes = 0

    def __init__(self, *, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes

    def opening(self, tensors: Sequence[PlannedTensor]) -> AbstractContextManager[None]:
        del tensors
        return nullcontext()

    def allocate(self, tensor: PlannedTensor) -> torch.Tensor:
        """Memory that is not touched before its values arrive."""
        dtype = torch_dtype(tensor.dtype)
        if are_offered(tensor.nbytes):
            return empty_pages(tensor.shape, dtype, tensor.strides)
        return torch.empty_strided(tensor.shape, tensor.strides, dtype=dtype, device="cpu")

    def worker(self) -> CpuWorker:
        """One for each thread."""
        return CpuWorker(self._chunk_bytes)

    def settle(self) -> None:
        """Nothing is under way, and overflows are counted as they come."""

    def finish(self) -> None:
        """Nothing is under way."""

    def notices(self) -> tuple[str, ...]:
        return ()

    def room(self) -> Mapping[str, int]:
        return {}

    def peak_bytes(self) -> int:
        return 0


class PagedCpuLane(CpuLane):
    """The CPU lane for tensors that may be replaced as soon as they are complete."""

    def allocate(self, tensor: PlannedTensor) -> torch.Tensor:
        """Memory that goes back to the system when the tensor is let go."""
        return empty_pages(tensor.shape, torch_dtype(tensor.dtype), tensor.strides)


class CpuWorker:
    """One thread's buffers."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._raw = Buffer()
        self._panel = Buffer()
        self.scratch = Scratch()

    def carry(
        self,
        chunk: Chunk,
        stored: torch.dtype,
        read: Reader,
        destinations: Sequence[Destination],
    ) -> None:
        if read.held is not None and not (chunk.staged and _casts(chunk, stored, destinations)):
            for part in chunk.parts:
                _copy_part(read.held[chunk.start : chunk.stop], part, destinations[part.target])
        elif chunk.staged and (
            columns := 0 if read.at_once else columns_to_turn(chunk, stored, self._chunk_bytes)
        ):
            self._carry_turned(chunk, columns, read, destinations)
        elif chunk.staged:
            self._carry_panel(chunk, stored, read, destinations)
        elif chunk.direct and destinations[chunk.parts[0].target].tensor.dtype == stored:
            self._carry_direct(chunk, read, destinations)
        elif chunk.direct and read.at_once:
            self._carry_decoded(chunk, stored, read, destinations)
        else:
            raw = self._raw.elements(chunk.stop - chunk.start, stored)
            read(chunk.start, chunk.stop, memory_at(raw, 0, raw.numel()))
            for part in chunk.parts:
                _copy_part(raw, part, destinations[part.target])

    def carry_joined(self, job: Job, source: Source, destinations: Sequence[Destination]) -> None:
        del job, source, destinations
        raise AssertionError("nothing is joined for this lane")

    def close(self) -> None:
        """Let the buffers go."""
        self._raw, self._panel, self.scratch = Buffer(), Buffer(), Scratch()

    @staticmethod
    def _carry_direct(chunk: Chunk, read: Reader, destinations: Sequence[Destination]) -> None:
        part = chunk.parts[0]
        tensor = destinations[part.target].tensor
        count = chunk.stop - chunk.start
        _prepare(destinations[part.target], part)
        read(chunk.start, chunk.stop, memory_at(tensor, part.target_offset, count))
        if tensor.dtype == torch.bool:
            held = torch.as_strided(
                tensor, (count,), (1,), tensor.storage_offset() + part.target_offset
            )
            refuse_odd_bools(held)

    def _carry_decoded(
        self,
        chunk: Chunk,
        stored: torch.dtype,
        read: Reader,
        destinations: Sequence[Destination],
    ) -> None:
        """Decode a run in steps, and cast each while it is in the caches."""
        (part,) = chunk.parts
        start = chunk.start
        while start < chunk.stop:
            stop = min((start // read.at_once + 1) * read.at_once, chunk.stop)
            raw = self._raw.elements(stop - start, stored)
            read(start, stop, memory_at(raw, 0, raw.numel()))
            offset = part.target_offset + start - chunk.start
            step = Part(part.target, (stop - start,), (1,), 0, (1,), offset)
            _copy_part(raw, step, destinations[part.target])
            start = stop

    def _carry_panel(
        self,
        chunk: Chunk,
        stored: torch.dtype,
        read: Reader,
        destinations: Sequence[Destination],
    ) -> None:
        """Cast whole rows into staging, then copy each part once, transposed.

        Writing a transposed destination block by block touches each of its pages and cache lines
        many times; from staging torch's blocked transposition writes them once.
        """
        first = destinations[chunk.parts[0].target]
        dtypes = {destinations[part.target].tensor.dtype for part in chunk.parts}
        dtype = first.tensor.dtype if len(dtypes) == 1 else stored
        panel = self._panel.elements(chunk.stop - chunk.start, dtype)
        lost: torch.Tensor | None = None
        if dtype == stored:
            read(chunk.start, chunk.stop, memory_at(panel, 0, panel.numel()))
        else:
            lost = self._fill_panel(panel, chunk, stored, read)
        for part in chunk.parts:
            _copy_part(panel, part, destinations[part.target])
            if lost is not None:
                held = torch.as_strided(lost, part.shape, part.source_strides, part.source_offset)
                _count(destinations[part.target], int(held.sum()))

    def _carry_turned(
        self, chunk: Chunk, columns: int, read: Reader, destinations: Sequence[Destination]
    ) -> None:
        """Read a run of rows, and turn and cast it while it is in the caches."""
        for part in chunk.parts:
            _prepare(destinations[part.target], part)
        rows = (chunk.stop - chunk.start) // columns
        for start, stop in tiles(rows, columns, self._chunk_bytes):
            raw = self._raw.elements((stop - start) * columns, torch.float32)
            first = chunk.start + start * columns
            read(first, first + raw.numel(), memory_at(raw, 0, raw.numel()))
            for low, high in tiles(stop - start, columns, self._chunk_bytes, at_once=True):
                size = (high - low) * columns
                pixel = (1, size, 1, 1), (size, 1, size, size), low * columns
                tile = torch.channel_shuffle(raw.as_strided(*pixel), high - low).view(-1)
                for part in parts_of(chunk.parts, columns, start + low, start + high):
                    to = destinations[part.target]
                    _copy_part(tile, part, to, counts=may_overflow(tile, to.tensor.dtype))

    def _fill_panel(
        self, panel: torch.Tensor, chunk: Chunk, stored: torch.dtype, read: Reader
    ) -> torch.Tensor | None:
        """Read and cast a block into ``panel``; where values overflowed, if any did."""
        lost: torch.Tensor | None = None
        step = read.at_once or max(self._chunk_bytes // stored.itemsize, 1)
        for start in range(chunk.start, chunk.stop, step):
            stop = min(start + step, chunk.stop)
            raw = self._raw.elements(stop - start, stored)
            read(start, stop, memory_at(raw, 0, raw.numel()))
            place = slice(start - chunk.start, stop - chunk.start)
            panel[place].copy_(raw)
            if not can_overflow(stored, panel.dtype):
                continue
            here = overflowed(raw, panel[place])
            if here is not None:
                lost = torch.zeros(panel.numel(), dtype=torch.bool) if lost is None else lost
                lost[place] = here
        return lost


def refuse_odd_bools(values: torch.Tensor) -> None:
    """Raise CheckpointError for bytes that are neither 0 nor 1, which torch would keep."""
    if values.numel() and int(values.view(torch.uint8).max()) > 1:
        raise CheckpointError("a BOOL tensor holds a byte that is neither 0 nor 1")


def _casts(chunk: Chunk, stored: torch.dtype, destinations: Sequence[Destination]) -> bool:
    return any(destinations[part.target].tensor.dtype != stored for part in chunk.parts)


def _prepare(destination: Destination, part: Part) -> None:
    """Have the pages made that a part fills without gaps, if they are new."""
    spans = zip(part.shape, part.target_strides, strict=True)
    span = sum((size - 1) * stride for size, stride in spans) + 1
    if destination.is_fresh and span == numel(part.shape):
        size = destination.tensor.element_size()
        populate(destination.tensor.data_ptr() + part.target_offset * size, span * size)


def _copy_part(
    raw: torch.Tensor, part: Part, destination: Destination, *, counts: bool = True
) -> None:
    """Copy a part in the target's order of dimensions: torch's blocked transposition is taken
    only if the target is the contiguous one of the two. ``counts``: values may overflow.
    """
    if raw.dtype == torch.bool:
        refuse_odd_bools(raw)
    _prepare(destination, part)
    order = sorted(range(len(part.shape)), key=lambda d: -part.target_strides[d])
    shape, source, target = (
        tuple([values[d] for d in order])
        for values in (part.shape, part.source_strides, part.target_strides)
    )
    start = destination.tensor.storage_offset() + part.target_offset
    view = torch.as_strided(destination.tensor, shape, target, start)
    picked = torch.as_strided(raw, shape, source, raw.storage_offset() + part.source_offset)
    view.copy_(picked)
    if counts and can_overflow(raw.dtype, view.dtype):
        _count(destination, count_overflows(picked, view))


def _count(destination: Destination, lost: int) -> None:
    if lost:
        with _COUNTING:
            destination.overflows += lost
