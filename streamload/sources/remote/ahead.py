"""Ranges that are fetched before they are asked for: a bounded number, in bounded memory."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from streamload.system.thread_end import end_thread

PIECE_BYTES = 2 << 20
MOST_PIECES = 8
MOST_BYTES = MOST_PIECES * PIECE_BYTES
"""What is fetched, or held, at a time of what is not asked for yet."""
_MOST_PENDING = 1024

Fetch = Callable[[str, int, memoryview], None]
"""fetch(path, offset, buffer) fills the buffer, or raises."""


@dataclass(eq=False)
class _Piece:
    path: str
    start: int
    stop: int
    memory: mmap.mmap | None = field(default=None, repr=False)
    error: BaseException | None = None
    is_there: bool = False
    left: int = 0
    readers: int = 0


class Ahead:
    """What threads of its own fetch of the files of one server."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._news = threading.Condition()
        self._pending: deque[_Piece] = deque()
        self._pieces: list[_Piece] = []
        self._threads: list[threading.Thread] = []
        self._unused: list[mmap.mmap] = []
        self._is_closed = False

    def want(self, path: str, start: int, stop: int) -> None:
        """Have [start, stop) fetched, in the order of these calls; as far as there is room."""
        with self._news:
            last = self._pending[-1] if self._pending else None
            if last is not None and (last.path, last.stop) == (path, start):
                start = last.stop = self._free_until(
                    path, start, min(stop, last.start + PIECE_BYTES)
                )
            while start < stop and len(self._pending) < _MOST_PENDING and not self._is_closed:
                known = self._holder(path, start, (*self._pending, *self._pieces))
                end = known.stop if known else self._free_until(path, start, stop)
                if known is None:
                    self._pending.append(_Piece(path, start, end))
                start = end
            self._start_threads()
            self._news.notify_all()

    def read(self, path: str, start: int, buffer: memoryview) -> int:
        """Fill the beginning of ``buffer`` with the bytes from ``start`` on: what is there is
        copied, what is under way is waited for, and the rest is fetched at once.

        Returns:
            How many bytes, at least one.

        Raises:
            What fetching them raised.
        """
        with self._news:
            piece = self._holder(path, start, self._pieces)
            if piece is None:
                count = self._claim(path, start, start + buffer.nbytes) - start
            else:
                self._news.wait_for(lambda: piece.is_there or self._is_closed)
                count = min(piece.stop - start, buffer.nbytes)
                if piece.error is not None:
                    self._drop(piece)
                    raise piece.error
                piece.readers += 1
        if piece is None or piece.memory is None:
            self._fetch(path, start, buffer[:count])
            return count
        begin = start - piece.start
        with memoryview(piece.memory) as whole:
            buffer[:count] = whole[begin : begin + count]
        with self._news:
            piece.readers -= 1
            piece.left -= count
            if piece.left <= 0:
                self._drop(piece)
            else:
                self._reuse(piece)
        return count

    def stop(self) -> None:
        """Nothing more is fetched."""
        with self._news:
            self._is_closed = True
            self._pending.clear()
            self._news.notify_all()

    def join(self) -> None:
        """Wait for what is being fetched, after ``stop``."""
        for thread in self._threads:
            end_thread(thread)
        self._pieces.clear()
        self._unused.clear()

    def _holder(self, path: str, start: int, pieces: Iterable[_Piece]) -> _Piece | None:
        return next((p for p in pieces if p.path == path and p.start <= start < p.stop), None)

    def _free_until(self, path: str, start: int, stop: int) -> int:
        """Where a new piece from ``start`` on ends: before the next one, and of bounded size."""
        later = (
            p.start for p in (*self._pending, *self._pieces) if p.path == path and p.start > start
        )
        return min((start + PIECE_BYTES, stop, *later))

    def _claim(self, path: str, start: int, stop: int) -> int:
        """Where what the caller fetches by itself ends; nobody else will fetch it."""
        piece = self._holder(path, start, self._pending)
        end = min(stop, piece.stop) if piece else self._free_until(path, start, stop)
        if piece is not None and end < piece.stop:
            piece.start = end
        elif piece is not None:
            self._pending.remove(piece)
        elif end < stop:  # nobody said that it is wanted
            self.want(path, end, stop)
        if len(self._pieces) >= MOST_PIECES and all(piece.is_there for piece in self._pieces):
            self._drop(self._pieces[0])  # nobody takes them
        return end

    def _start_threads(self) -> None:
        while len(self._threads) < min(len(self._pending), MOST_PIECES):
            name = f"streamload-ahead-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _drop(self, piece: _Piece) -> None:
        if piece in self._pieces:
            self._pieces.remove(piece)
            self._news.notify_all()
        self._reuse(piece)

    def _reuse(self, piece: _Piece) -> None:
        """Have the next piece use the memory of one that is dropped, once nobody reads it."""
        if piece.memory is not None and not piece.readers and piece not in self._pieces:
            self._unused.append(piece.memory)
            piece.memory = None

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(
                    lambda: self._is_closed or (self._pending and len(self._pieces) < MOST_PIECES)
                )
                if self._is_closed:
                    return
                piece = self._pending.popleft()
                piece.left = piece.stop - piece.start
                self._pieces.append(piece)
                # Not from the allocator, whose arenas keep what each thread once had.
                memory = self._unused.pop() if self._unused else mmap.mmap(-1, PIECE_BYTES)
            try:
                with memoryview(memory) as whole:
                    self._fetch(piece.path, piece.start, whole[: piece.left])
            except BaseException as error:
                piece.error = error  # raised where the bytes are asked for
            with self._news:
                piece.memory, piece.is_there = memory, True
                if piece not in self._pieces:
                    self._reuse(piece)
                self._news.notify_all()
