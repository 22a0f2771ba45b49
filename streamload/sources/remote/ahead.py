"""Ranges that are fetched before they are asked for: a bounded number, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
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
    data: bytearray = field(default_factory=bytearray, repr=False)
    error: BaseException | None = None
    is_there: bool = False
    left: int = 0


class Ahead:
    """What threads of its own fetch of the files of one server."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._news = threading.Condition()
        self._pending: deque[_Piece] = deque()
        self._pieces: list[_Piece] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def want(self, path: str, start: int, stop: int) -> None:
        """Have [start, stop) fetched, in the order of these calls; as far as there is room."""
        with self._news:
            last = self._pending[-1] if self._pending else None
            if last is not None and (last.path, last.stop) == (path, start):
                grown = min(stop, last.start + PIECE_BYTES)
                start, last.stop = grown, grown
            while start < stop and len(self._pending) < _MOST_PENDING and not self._is_closed:
                end = min(start + PIECE_BYTES, stop)
                if not self._covers(path, start):
                    self._pending.append(_Piece(path, start, end))
                start = end
            while len(self._threads) < min(len(self._pending), MOST_PIECES):
                name = f"streamload-ahead-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._news.notify_all()

    def take(self, path: str, start: int, buffer: memoryview) -> int:
        """Copy what is there of the bytes from ``start`` on; waits for those under way.

        Returns:
            How many bytes of ``buffer`` are filled; 0 if the caller has to fetch them itself.

        Raises:
            What fetching them raised.
        """
        with self._news:
            piece = next((p for p in self._pieces if _holds(p, path, start)), None)
            if piece is None:
                self._leave_to_caller(path, start, start + buffer.nbytes)
                return 0
            self._news.wait_for(lambda: piece.is_there or self._is_closed)
            if piece.error is not None or not piece.is_there:
                self._drop(piece)
                if piece.error is None:
                    return 0
                raise piece.error
        count = min(piece.stop - start, buffer.nbytes)
        begin = start - piece.start
        buffer[:count] = memoryview(piece.data)[begin : begin + count]
        with self._news:
            piece.left -= count
            if piece.left <= 0:
                self._drop(piece)
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

    def _covers(self, path: str, start: int) -> bool:
        return any(_holds(piece, path, start) for piece in (*self._pending, *self._pieces))

    def _leave_to_caller(self, path: str, start: int, stop: int) -> None:
        """Forget what the caller reads by itself now; make room if nobody takes what is there."""
        inside = [
            p for p in self._pending if p.path == path and start <= p.start and p.stop <= stop
        ]
        for piece in inside:
            self._pending.remove(piece)
        if len(self._pieces) >= MOST_PIECES and all(piece.is_there for piece in self._pieces):
            self._drop(self._pieces[0])

    def _drop(self, piece: _Piece) -> None:
        if piece in self._pieces:
            self._pieces.remove(piece)
            self._news.notify_all()

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
            try:
                piece.data = bytearray(piece.left)
                self._fetch(piece.path, piece.start, memoryview(piece.data))
            except BaseException as error:
                piece.error = error  # raised where the bytes are asked for
            with self._news:
                piece.is_there = True
                self._news.notify_all()


def _holds(piece: _Piece, path: str, start: int) -> bool:
    return piece.path == path and piece.start <= start < piece.stop
