"""The physical floor of a load on this machine, with as many workers as the loaders get.

Threads read blocks of 4 MiB into one reused buffer each and, for the second figure, cast them
into fresh memory with torch (or read straight into it where nothing is to be cast). Nothing is
planned, checked, named or transposed.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamload.core.specs import Shape

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK_BYTES", "Piece", "copy_rate", "read_and_cast", "read_only"]

BLOCK_BYTES = 4 << 20
AHEAD_BLOCKS = 8
"""How many blocks the page cache is asked to fetch before they are read."""
_COPY_BYTES = 64 << 20
_COPIES = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored tensor: where its bytes are, and its dtype by torch's name."""

    name: str
    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: Shape


def read_only(pieces: Sequence[Piece], *, workers: int) -> None:
    """Reads everything, keeps nothing."""

    def carry(block: _Block, read: _Read, buffer: torch.Tensor) -> None:
        read(block, buffer[: block.nbytes])

    _each_block(pieces, carry, workers=workers)


def read_and_cast(
    pieces: Sequence[Piece], dtype: torch.dtype | None, *, workers: int
) -> dict[str, torch.Tensor]:
    """Reads everything into new tensors, floats of which are of ``dtype`` (None: as stored)."""
    import torch

    stored = {piece.name: _torch_dtype(piece) for piece in pieces}
    made = {
        piece.name: torch.empty(
            piece.shape,
            dtype=dtype if dtype and stored[piece.name].is_floating_point else stored[piece.name],
        )
        for piece in pieces
    }
    flat = {name: tensor.view(-1) for name, tensor in made.items()}

    def carry(block: _Block, read: _Read, buffer: torch.Tensor) -> None:
        own = stored[block.piece.name]
        first, count = block.start // own.itemsize, block.nbytes // own.itemsize
        target = flat[block.piece.name][first : first + count]
        if target.dtype == own:
            read(block, target.view(torch.uint8))
            return
        read(block, buffer[: block.nbytes])
        target.copy_(buffer[: block.nbytes].view(own))

    _each_block(pieces, carry, workers=workers)
    return made


def copy_rate(*, workers: int) -> float:
    """Bytes a second that copying moves through memory: what is read and what is written.

    Each of the workers copies between two blocks of its own, larger than usual caches, whose
    pages are there already. Seconds are those that each thread was computing: what other
    processes take away is not the memory's fault.
    """
    import torch

    barrier = threading.Barrier(workers)
    rates: list[float] = []

    def work() -> None:
        torch.set_num_threads(1)
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
        target = torch.ones(_COPY_BYTES, dtype=torch.uint8)
        barrier.wait()
        start_s = time.thread_time()
        for _ in range(_COPIES):
            target.copy_(source)
        rates.append(2 * _COPIES * _COPY_BYTES / (time.thread_time() - start_s))

    _run_threads(work, workers)
    return sum(rates)


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes ``[start, start + nbytes)`` of one piece."""

    piece: Piece
    start: int
    nbytes: int


_Read = Callable[[_Block, "torch.Tensor"], None]
_Carry = Callable[[_Block, _Read, "torch.Tensor"], None]


def _torch_dtype(piece: Piece) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, piece.dtype)
    return found


def _each_block(pieces: Sequence[Piece], carry: _Carry, *, workers: int) -> None:
    import torch

    blocks = [
        _Block(piece, start, min(BLOCK_BYTES, piece.nbytes - start))
        for piece in pieces
        for start in range(0, piece.nbytes, BLOCK_BYTES)
    ]
    turns = iter(range(len(blocks)))  # next() on it is one step under the interpreter's lock
    failures: list[Exception] = []

    def work() -> None:
        torch.set_num_threads(1)
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        with _Files() as files:
            try:
                for turn in turns:
                    for block in blocks[turn + AHEAD_BLOCKS : turn + AHEAD_BLOCKS + 1]:
                        files.prefetch(block)
                    carry(blocks[turn], files.read, buffer)
                    if failures:
                        return
            except (OSError, EOFError, RuntimeError, MemoryError) as error:
                failures.append(error)

    with _Files() as files:
        for block in blocks[:AHEAD_BLOCKS]:
            files.prefetch(block)
    _run_threads(work, workers)
    if failures:
        raise failures[0]


def _run_threads(work: Callable[[], None], count: int) -> None:
    """Runs ``work`` in threads with one torch thread each; new threads get what they got before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)


class _Files:
    """One thread's open files: seek and readinto exist everywhere, and share no offset so."""

    def __init__(self) -> None:
        self._open: dict[str, io.FileIO] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._open.values():
            file.close()

    def _file(self, path: str) -> io.FileIO:
        if path not in self._open:
            self._open[path] = open(path, "rb", buffering=0)  # noqa: SIM115
        return self._open[path]

    def read(self, block: _Block, target: torch.Tensor) -> None:
        file, memory = self._file(block.piece.file), target.numpy().data.cast("B")
        file.seek(block.piece.offset + block.start)
        while memory:
            count = file.readinto(memory)
            if not count:
                raise EOFError(f"{block.piece.file} ended early")
            memory = memory[count:]

    def prefetch(self, block: _Block) -> None:
        if hasattr(os, "posix_fadvise"):
            file, start = self._file(block.piece.file), block.piece.offset + block.start
            os.posix_fadvise(file.fileno(), start, block.nbytes, os.POSIX_FADV_WILLNEED)
