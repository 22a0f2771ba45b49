"""What the workers take: blocks in the file's order, with readahead, from one shared queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from streamload.core.dtypes import BY_NAME
from streamload.core.options import Settings
from streamload.core.specs import Extent, StridedCopy, TensorSpec
from streamload.engine.chunks import Chunk, cut
from streamload.planning.records import PlannedTensor
from streamload.sources.base import Source
from streamload.sources.blocks import bytes_of

# How far the page cache is asked to read ahead of the workers.
READAHEAD_BYTES = 48 << 20
_MOST_AHEAD = 256


class Job(NamedTuple):
    """Chunks of one stored tensor; several only where it can but be read whole.

    Attributes:
        chunks: what is read, and where its parts go.
        extent: the bytes the job reads, if they lie in a file.
        nbytes: how many it reads.
        target: number of the first destination it writes.
        parts: several jobs that are read at once, see ``joining``; ``spec`` and ``chunks`` are
            then the first one's, ``extent`` is all of theirs and what lies between.
    """

    spec: TensorSpec
    chunks: tuple[Chunk, ...]
    extent: Extent | None
    nbytes: int
    target: int
    parts: tuple[Job, ...] = ()


def jobs_of(
    tensors: Sequence[PlannedTensor],
    stored: Mapping[str, TensorSpec],
    order: Mapping[str, int],
    numbers: Mapping[str, int],
    options: Settings,
) -> Iterator[Job]:
    """The jobs that fill ``tensors``, in the order of the files.

    Args:
        tensors: targets without arithmetic.
        stored: the stored tensors' specs.
        order: stored name → its place in the files.
        numbers: target name → number of its destination.
        options: bounds of what is read and staged at once.
    """
    by_source: dict[str, list[tuple[int, StridedCopy]]] = {}
    itemsizes: dict[str, int] = {}
    for tensor in tensors:
        for copy in tensor.copies:
            by_source.setdefault(copy.stored_name, []).append((numbers[tensor.name], copy))
            size = BY_NAME[tensor.dtype].itemsize
            itemsizes[copy.stored_name] = max(size, itemsizes.get(copy.stored_name, 0))
    for name in sorted(by_source, key=order.__getitem__):
        spec = stored[name]
        size = BY_NAME[spec.dtype].itemsize
        chunks = cut(
            by_source[name],
            itemsize=size,
            chunk_bytes=options.chunk_bytes,
            staging_bytes=options.staging_bytes,
            staged_itemsize=itemsizes[name],
        )
        whole = spec.extent
        for some in ((chunk,) for chunk in chunks) if whole is not None else (tuple(chunks),):
            start, nbytes = some[0].start * size, sum(c.stop - c.start for c in some) * size
            extent = whole and Extent(whole.file, whole.offset + start, nbytes)
            yield Job(spec, some, extent, nbytes, some[0].parts[0].target)


class Reader:
    """Reads stored elements of one tensor.

    Attributes:
        held: all elements as a flat tensor in memory order, if they are in host memory already;
            never to be written to.
    """

    def __init__(self, source: Source, spec: TensorSpec) -> None:
        self._source = source
        self._spec = spec
        self._size = BY_NAME[spec.dtype].itemsize
        self.held = source.held(spec.name)
        if self.held is None and spec.extent is None:
            self.held = source.tensor(spec.name).contiguous().view(-1)

    def __call__(self, start: int, stop: int, buffer: memoryview, /) -> None:
        """Fill ``buffer``, which is the caller's throughout, with the elements [start, stop)."""
        size = self._size
        extent = self._spec.extent
        if self.held is not None:
            buffer[:] = bytes_of(self.held)[start * size : stop * size]
        else:
            assert extent is not None, "without an extent the tensor is held"
            part = Extent(extent.file, extent.offset + start * size, (stop - start) * size)
            self._source.read_into(part, buffer, tensor=self._spec.name)


class JobQueue:
    """Hands out jobs to the workers and says which bytes to prefetch meanwhile."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._ahead: deque[Job] = deque()
        self._ahead_bytes = 0
        self._lock = threading.Lock()

    def take(self) -> tuple[Job | None, list[Extent]]:
        """The next job, or None at the end; and extents that are due soon, neighbours as one."""
        due: list[Extent] = []
        with self._lock:
            while self._ahead_bytes < READAHEAD_BYTES and len(self._ahead) < _MOST_AHEAD:
                job = next(self._jobs, None)
                if job is None:
                    break
                self._ahead.append(job)
                self._ahead_bytes += job.nbytes
                last, new = due[-1] if due else None, job.extent
                if (
                    new
                    and last
                    and (last.file, last.offset + last.nbytes) == (new.file, new.offset)
                ):
                    due[-1] = Extent(last.file, last.offset, last.nbytes + new.nbytes)
                elif new:
                    due.append(new)
            if not self._ahead:
                return None, due
            job = self._ahead.popleft()
            self._ahead_bytes -= job.nbytes
            return job, due
