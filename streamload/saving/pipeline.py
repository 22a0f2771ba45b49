"""Fills new files from a plan: chunks are made by the engine's workers, then written, in turns.

While one staging buffer is written, the next is filled; nothing else of the model is in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.findings import added_up
from streamload.core.options import Progress
from streamload.engine.execute import Execution
from streamload.engine.lanes.cpu import CpuLane, CpuWorker
from streamload.engine.output_chunks import OutputChunk, batches, execute_chunks
from streamload.planning.records import Plan, PlannedTensor
from streamload.saving.atomic import StagedFile
from streamload.sources.base import Source
from streamload.sources.blocks import bytes_of
from streamload.system.pages import empty_pages

# Two of these are staged. One holds the largest matrix of GPT-2 XL in float32, so that none of
# its transpositions is cut.
OUTPUT_CHUNK_BYTES = 40 << 20

# Tensor name → (file, offset of its first byte).
Place = tuple[StagedFile, int]


def fill(
    plan: Plan,
    source: Source,
    places: Mapping[str, Place],
    *,
    progress: Progress | None = None,
) -> Execution:
    """Make every planned tensor and write it to its place.

    Args:
        plan: must hold; targets are contiguous.
        source: what the plan was made from.
        places: where each target goes.
        progress: called as progress(done_bytes, total_bytes, name).

    Raises:
        WriteError, ReadError, CheckpointError: the caller discards the files.
    """
    total = sum(t.nbytes for t in plan.tensors)
    totals = Execution()
    workers: list[CpuWorker] = []
    buffers = (_Staging(workers), _Staging(workers))
    writing: Future[None] | None = None
    with ThreadPoolExecutor(1) as writer:  # one batch is written while the next is made
        for turn, batch in enumerate(batches(plan.tensors, OUTPUT_CHUNK_BYTES)):
            staging = buffers[turn % 2]
            staging.begin(batch)
            run = execute_chunks(plan, source, batch, staging)
            if writing is not None:
                writing.result()
            parts = [(places[c.name], c, run.tensors[c.key]) for c in batch]
            writing = writer.submit(_write, parts)
            totals.bytes_read += run.bytes_read
            totals.bytes_written += run.bytes_written
            totals.findings += run.findings
            if progress is not None:
                progress(totals.bytes_written, total, batch[-1].name)
    if writing is not None:
        writing.result()
    totals.findings = added_up(totals.findings)
    return totals


class _Staging(CpuLane):
    """A lane whose tensors are carved out of one buffer that is used again and again.

    Args:
        idle: workers with their buffers, between two batches; shared by both lanes.
    """

    def __init__(self, idle: list[CpuWorker]) -> None:
        super().__init__(chunk_bytes=4 << 20)
        self._idle = idle
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def begin(self, batch: Sequence[OutputChunk]) -> None:
        """Start over with room for a batch."""
        needed_bytes = sum(_aligned(chunk.planned.nbytes) for chunk in batch)
        self._used = 0
        if self._buffer.numel() < needed_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = empty_pages((needed_bytes,), torch.uint8)

    def worker(self) -> CpuWorker:
        """One that has worked before, if there is any: its buffers are made already."""
        try:
            return self._idle.pop()
        except IndexError:
            return _KeptWorker(self._idle)

    def allocate(self, tensor: PlannedTensor) -> torch.Tensor:
        """The next free part of the buffer, aligned to 64 bytes."""
        dtype: torch.dtype = getattr(torch, BY_NAME[tensor.dtype].torch_name or "")
        part = self._buffer[self._used : self._used + tensor.nbytes].view(dtype)
        self._used += _aligned(tensor.nbytes)
        return part


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class _KeptWorker(CpuWorker):
    """Keeps its buffers when it is closed, and waits for the next batch."""

    def __init__(self, idle: list[CpuWorker]) -> None:
        super().__init__(4 << 20)
        self._idle = idle

    def close(self) -> None:
        """Wait among the idle."""
        self._idle.append(self)


def _write(parts: list[tuple[Place, OutputChunk, torch.Tensor]]) -> None:
    for (file, offset), chunk, tensor in parts:
        file.write(bytes_of(tensor), offset + chunk.start * tensor.element_size())
