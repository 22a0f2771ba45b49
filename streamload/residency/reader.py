"""Reads blocks ahead of their use, through a ring of buffers or into memory where they stay.

A few threads share the reading of one block after the other, in the order in which a pass through
the model uses them; at its end they go on with the first of the next pass.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from streamload.residency.choice import RING_BUFFERS, MappedBlock
from streamload.residency.direct import AgainFile
from streamload.system.pages import anonymous_pages

# Two are on their way to the disk while another's is copied or waited for.
_THREADS = 3
_CHUNK_BYTES = 4 << 20
# How long is waited for a buffer that others use; then the block is used where it is mapped.
_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Chunk:
    file: str
    offset: int
    position: int
    nbytes: int


# True if the bytes (of a file, from an offset, so many) are in the page cache.
IsCached: TypeAlias = Callable[[str, int, int], bool]


class Fill:
    """One block on its way into a buffer.

    Attributes:
        at: the block's number.
        memory: its buffer.
        stays: the buffer is the block's own, not one of the ring.
        users: forwards that wait for it or use it.
        failed: it cannot be read.
    """

    def __init__(self, at: int, memory: mmap.mmap, block: MappedBlock, *, stays: bool) -> None:
        self.at = at
        self.memory = memory
        self.stays = stays
        self.users = 0
        self.failed = False
        self.chunks = deque(_chunks(block))
        self.reading = 0

    @property
    def is_done(self) -> bool:
        return not self.chunks and not self.reading


class BlockReader:
    """Gives out blocks as they are asked for, and reads on meanwhile.

    Args:
        blocks: in the order of a pass, as far as it is known.
        files: by path, open.
        is_cached: asked before each read.
    """

    def __init__(
        self, blocks: Sequence[MappedBlock], files: Mapping[str, AgainFile], is_cached: IsCached
    ) -> None:
        self._blocks = blocks
        self._largest = max(block.nbytes for block in blocks)
        self._files = files
        self._is_cached = is_cached
        self._following = [*range(1, len(blocks)), 0]
        self._changed = threading.Condition()
        self._fills: dict[int, Fill] = {}
        self._queue: deque[Fill] = deque()
        self._free: list[mmap.mmap] = []
        self._in_ring = 0
        self._stay: frozenset[int] = frozenset()
        self._there: set[int] = set()
        self._next: int | None = None
        self._last: int | None = None
        self._stopped = False
        self._threads: list[threading.Thread] = []

    def keep(self, stay: frozenset[int]) -> None:
        """From now on the blocks of these numbers are read to memory of their own, once."""
        with self._changed:
            self._stay, self._there = stay, self._there & stay
            for fill in list(self._fills.values()):
                # Read for nothing: a block that may not stay after all takes memory.
                if fill.stays and fill.at not in stay and not fill.users:
                    self._drop(fill)

    def take(self, at: int) -> Fill | None:
        """The block, read whole; None if that failed, or no buffer came free. ``give_back`` it."""
        with self._changed:
            self._start()
            self._learn(at)
            while (fill := self._fills.get(at)) is None:
                if self._stopped:
                    return None
                self._turn_to(at)
                # All buffers are in use, by forwards of other threads.
                if at not in self._fills and not self._changed.wait(_PATIENCE_S):
                    return None
            fill.users += 1
            try:
                self._changed.wait_for(lambda: fill.is_done or self._stopped)
            except BaseException:
                self._put(fill)
                raise
            if fill.failed or not fill.is_done:
                self._put(fill)
                return None
            return fill

    def give_back(self, fill: Fill, *, stays: bool = False) -> None:
        """The buffer may be used again, unless the block ``stays`` in it: its own."""
        assert fill.stays or not stays, "buffers of the ring stay in it"
        with self._changed:
            if stays:
                self._there.add(fill.at)
            self._put(fill)

    def coming_bytes(self) -> int:
        """Memory that is still to be taken: by the ring, and by blocks that are to stay."""
        with self._changed:
            coming = (RING_BUFFERS - self._in_ring) * self._largest
            for at in self._stay - self._there:
                fill = self._fills.get(at)
                unread = None if fill is None else sum(chunk.nbytes for chunk in fill.chunks)
                coming += self._blocks[at].nbytes if unread is None else unread
            return coming

    def stop(self) -> None:
        """End the threads; who waits gets None. May be called twice, and from anywhere."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._changed.notify_all()

    def _put(self, fill: Fill) -> None:
        fill.users -= 1
        if not fill.users:
            self._drop(fill)
            self._plan_ahead()

    def _learn(self, at: int) -> None:
        if self._last is not None:
            self._following[self._last] = at
        self._last = at

    def _turn_to(self, at: int) -> None:
        """Another block is asked for than was read ahead."""
        for fill in list(self._fills.values()):
            if not fill.stays and not fill.users:
                self._drop(fill)
        self._next = at
        self._plan_ahead()

    def _drop(self, fill: Fill) -> None:
        if self._fills.get(fill.at) is fill:
            del self._fills[fill.at]
        fill.chunks.clear()
        if fill in self._queue:
            self._queue.remove(fill)
        if not fill.reading:
            self._free_buffer(fill)

    def _free_buffer(self, fill: Fill) -> None:
        if not fill.stays:
            self._free.append(fill.memory)
        self._changed.notify_all()

    def _plan_ahead(self) -> None:
        """Give buffers to the next blocks, as far as there are any."""
        for _ in self._blocks:
            at = self._next
            if at is None or self._stopped:
                return
            if at not in self._there and at not in self._fills:
                stays = at in self._stay
                memory = self._memory(at, stays=stays)
                if memory is None:
                    return
                fill = self._fills[at] = Fill(at, memory, self._blocks[at], stays=stays)
                self._queue.append(fill)
                self._changed.notify_all()
            self._next = self._following[at]

    def _memory(self, at: int, *, stays: bool) -> mmap.mmap | None:
        if stays:
            return anonymous_pages(self._blocks[at].nbytes)
        if self._free:
            return self._free.pop()
        if self._in_ring == RING_BUFFERS:
            return None
        self._in_ring += 1
        return anonymous_pages(self._largest)

    def _start(self) -> None:
        while len(self._threads) < _THREADS and not self._stopped:
            name = f"streamload-blocks-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._queue)
                if self._stopped:
                    return
                fill = self._queue[0]
                chunk = fill.chunks.popleft()
                fill.reading += 1
                if not fill.chunks:
                    self._queue.popleft()
            try:
                self._read(fill, chunk)
                failed = False
            except Exception:  # whatever it is, the block can be used where it is mapped
                failed = True
            with self._changed:
                fill.reading -= 1
                fill.failed |= failed
                if fill.is_done:
                    if self._fills.get(fill.at) is not fill:
                        self._free_buffer(fill)
                    self._changed.notify_all()

    def _read(self, fill: Fill, chunk: _Chunk) -> None:
        self._files[chunk.file].read(
            chunk.offset,
            memoryview(fill.memory)[chunk.position : chunk.position + chunk.nbytes],
            is_cached=lambda: self._is_cached(chunk.file, chunk.offset, chunk.nbytes),
        )


def _chunks(block: MappedBlock) -> Iterator[_Chunk]:
    for run in block.runs:
        for start in range(run.start, run.stop, _CHUNK_BYTES):
            nbytes = min(_CHUNK_BYTES, run.stop - start)
            yield _Chunk(run.file, start, run.position + start - run.start, nbytes)
