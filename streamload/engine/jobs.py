"""What the workers take: blocks in the file's order, with readahead, from one shared queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from streamload.dtypes import BY_NAME
from streamload.engine.chunks import Block, cut
from streamload.planning.records import Plan, PlannedTensor
from streamload.sources.base import Source
from streamload.specs import Extent, Move, TensorSpec

__all__ = ["Job", "JobQueue", "jobs_of", "reader"]

# How far the page cache is asked to read ahead of the workers.
READAHEAD_BYTES = 48 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks of one stored tensor; several only where it can but be read whole.

    Attributes:
        extent: the bytes the job reads, if they lie in a file.
        nbytes: how many it reads.
    """

    spec: TensorSpec
    blocks: tuple[Block, ...]

    extent: Extent | None = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = BY_NAME[self.spec.dtype].itemsize
        start, stop = self.blocks[0].start, self.blocks[-1].stop
        whole = self.spec.extent
        extent = whole and Extent(whole.file, whole.offset + start * size, (stop - start) * size)
        object.__setattr__(self, "extent", extent)
        object.__setattr__(self, "nbytes", sum(b.stop - b.start for b in self.blocks) * size)


def jobs_of(
    plan: Plan, tensors: Sequence[PlannedTensor], numbers: Mapping[str, int]
) -> Iterator[Job]:
    """The jobs that fill ``tensors``, in the order of the files.

    Args:
        plan: where the stored tensors' specs and the sizes of blocks come from.
        tensors: targets without arithmetic.
        numbers: target name → number of its sink.
    """
    by_source: dict[str, list[tuple[int, Move]]] = {}
    dtypes: dict[str, int] = {}
    for tensor in tensors:
        for move in tensor.moves:
            by_source.setdefault(move.stored_name, []).append((numbers[tensor.name], move))
            size = BY_NAME[tensor.dtype].itemsize
            dtypes[move.stored_name] = max(size, dtypes.get(move.stored_name, 0))
    options = plan.options
    for name, spec in plan.stored.items():
        if name not in by_source:
            continue
        itemsize = BY_NAME[spec.dtype].itemsize
        blocks = cut(
            by_source[name],
            itemsize=itemsize,
            chunk_bytes=options.chunk_bytes,
            staging_bytes=options.staging_bytes,
            staged_itemsize=dtypes[name],
        )
        if spec.extent is None:
            yield Job(spec, tuple(blocks))
        else:
            for block in blocks:
                yield Job(spec, (block,))


def reader(source: Source, spec: TensorSpec) -> Callable[[int, int, memoryview], None]:
    """A function that fills a buffer with stored elements [start, stop) of one tensor."""
    size = BY_NAME[spec.dtype].itemsize
    extent = spec.extent
    if extent is not None:
        file, base = extent.file, extent.offset

        def read(start: int, stop: int, buffer: memoryview) -> None:
            part = Extent(file, base + start * size, (stop - start) * size)
            source.read_into(part, buffer, tensor=spec.name)

        return read

    from streamload.sources.blocks import bytes_of

    whole = source.tensor(spec.name).contiguous()

    def read_whole(start: int, stop: int, buffer: memoryview) -> None:
        # `whole` is named here so that it lives as long as this function.
        buffer[:] = bytes_of(whole)[start * size : stop * size]

    return read_whole


class JobQueue:
    """Hands out jobs to the workers and says which bytes to prefetch meanwhile."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._ahead: deque[Job] = deque()
        self._ahead_bytes = 0
        self._lock = threading.Lock()

    def take(self) -> tuple[Job | None, list[Extent]]:
        """The next job, or None at the end; and extents that are due soon."""
        due: list[Extent] = []
        with self._lock:
            while self._ahead_bytes < READAHEAD_BYTES:
                job = next(self._jobs, None)
                if job is None:
                    break
                self._ahead.append(job)
                self._ahead_bytes += job.nbytes
                if job.extent is not None:
                    _append_merged(due, job.extent)
            if not self._ahead:
                return None, due
            job = self._ahead.popleft()
            self._ahead_bytes -= job.nbytes
            return job, due


def _append_merged(extents: list[Extent], extent: Extent) -> None:
    last = extents[-1] if extents else None
    if last and last.file == extent.file and last.offset + last.nbytes == extent.offset:
        extents[-1] = Extent(last.file, last.offset, last.nbytes + extent.nbytes)
    else:
        extents.append(extent)
