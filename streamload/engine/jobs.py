"""What the workers take: blocks in the file's order, with readahead, from one shared queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from streamload.core.dtypes import BY_NAME
from streamload.core.options import Settings
from streamload.core.specs import Extent, StridedCopy, TensorSpec, numel, stored_bytes
from streamload.engine.chunks import Chunk, cut, runs_of, unwanted_in
from streamload.planning.records import PlannedTensor

# How far the page cache is asked to read ahead of the workers.
READAHEAD_BYTES = 48 << 20
_MOST_AHEAD = 256


class Job(NamedTuple):
    """Chunks of one stored tensor; several only where it can but be read whole.

    Attributes:
        chunks: what is read, and where its parts go.
        extents: the bytes the job reads, as far as they lie in a file.
        nbytes: how many of the stored bytes it counts for.
        unwanted_bytes: of these, those that it reads only since they lie between others.
        target: number of the first destination it writes.
        parts: several jobs that are read at once, see ``joining``; ``spec`` and ``chunks`` are
            then the first one's, ``extents`` is one run of all theirs and what lies between.
    """

    spec: TensorSpec
    chunks: tuple[Chunk, ...]
    extents: tuple[Extent, ...]
    nbytes: int
    target: int
    unwanted_bytes: int = 0
    parts: tuple[Job, ...] = ()

    @property
    def run(self) -> Extent | None:
        """The one run of bytes that it reads as they are, if there is one: these can be joined."""
        is_plain = self.spec.encoding is None and self.chunks[0].rows is None
        return self.extents[0] if len(self.extents) == 1 and is_plain else None


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
            quantum=1 if spec.encoding is None else spec.encoding.quantum,
            gap_bytes=options.gap_bytes if spec.encoding or spec.extent else 0,
        )
        if spec.encoding is not None:
            yield from _decoding(spec, chunks)
            continue
        whole = spec.extent
        for some in ((chunk,) for chunk in chunks) if whole is not None else (tuple(chunks),):
            nbytes = sum(c.stop - c.start for c in some) * size
            extents: tuple[Extent, ...] = ()
            if whole is not None:
                place = whole.file, whole.offset
                extents = tuple([_part(*place, size, *run) for run in runs_of(some)])
            unwanted = unwanted_in(some) * size
            yield Job(spec, some, extents, nbytes, some[0].parts[0].target, unwanted)


def _part(file: str, offset: int, size: int, start: int, stop: int) -> Extent:
    """Elements [start, stop), each of ``size`` bytes, of what begins at ``offset``."""
    return Extent(file, offset + start * size, (stop - start) * size)


def _decoding(spec: TensorSpec, chunks: Iterator[Chunk]) -> Iterator[Job]:
    """The jobs of an encoded tensor; their shares of its stored bytes are all of these, once."""
    nbytes, count = stored_bytes((spec,)), numel(spec.shape)
    for some in (tuple(chunks),) if spec.is_whole else ((chunk,) for chunk in chunks):
        runs = list(runs_of(some))
        extents = tuple(extent for run in runs for extent in spec.extents(*run))
        share = sum(nbytes * stop // count - nbytes * start // count for start, stop in runs)
        yield Job(spec, some, extents, share, some[0].parts[0].target)


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
                for new in job.extents:
                    _add(due, new)
            if not self._ahead:
                return None, due
            job = self._ahead.popleft()
            self._ahead_bytes -= job.nbytes
            return job, due


def _add(due: list[Extent], new: Extent) -> None:
    """Neighbours become one."""
    last = due[-1] if due else None
    if last and (last.file, last.offset + last.nbytes) == (new.file, new.offset):
        due[-1] = Extent(last.file, last.offset, last.nbytes + new.nbytes)
    else:
        due.append(new)
