"""The physical floor of a load on this machine, with as many workers as the loaders get.

Threads read blocks of 4 MiB into one reused buffer each and, for the second figure, cast them
into fresh memory with torch (or read straight into it where nothing is to be cast). Nothing is
planned, checked, named or transposed.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from streamload.core.specs import Shape

if TYPE_CHECKING:
    import torch

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

    def torch_dtype(self, floats: torch.dtype | None = None) -> torch.dtype:
        """Its dtype as torch's own object; ``floats`` instead if it is one of floats."""
        import torch

        stored: torch.dtype = getattr(torch, self.dtype)
        return floats if floats is not None and stored.is_floating_point else stored


def bytes_as(pieces: Sequence[Piece], dtype: torch.dtype | None) -> int:
    """Bytes of all pieces with floats of ``dtype`` (None: as stored)."""
    return sum(math.prod(p.shape) * p.torch_dtype(dtype).itemsize for p in pieces)


def read_only(pieces: Sequence[Piece], *, workers: int) -> None:
    _read_blocks(pieces, {}, workers=workers)


def read_and_cast(
    pieces: Sequence[Piece], dtype: torch.dtype | None, *, workers: int
) -> dict[str, torch.Tensor]:
    """Read everything into new tensors, floats of which are of ``dtype`` (None: as stored)."""
    import torch

    tensors = {p.name: torch.empty(p.shape, dtype=p.torch_dtype(dtype)) for p in pieces}
    _read_blocks(pieces, {n: t.view(-1) for n, t in tensors.items()}, workers=workers)
    return tensors


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
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
        target = torch.ones(_COPY_BYTES, dtype=torch.uint8)
        barrier.wait()
        start_s = time.thread_time()
        for _ in range(_COPIES):
            target.copy_(source)
        rates.append(2 * _COPIES * _COPY_BYTES / (time.thread_time() - start_s))

    run_threads(work, workers)
    return sum(rates)


class _Block(NamedTuple):
    """Bytes ``[start, start + nbytes)`` of one piece."""

    piece: Piece
    start: int
    nbytes: int


def _read_blocks(
    pieces: Sequence[Piece], targets: Mapping[str, torch.Tensor], *, workers: int
) -> None:
    """Read all pieces, cast into the flat tensors of their names; those without are dropped."""
    import torch

    blocks = [
        _Block(piece, start, min(BLOCK_BYTES, piece.nbytes - start))
        for piece in pieces
        for start in range(0, piece.nbytes, BLOCK_BYTES)
    ]
    turns = iter(range(len(blocks)))  # next() on it is one step under the interpreter's lock

    def work() -> None:
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        with _opened(pieces) as files:
            for turn in turns:
                for ahead in blocks[turn + AHEAD_BLOCKS : turn + AHEAD_BLOCKS + 1]:
                    _prefetch(ahead, files[ahead.piece.file])
                block = blocks[turn]
                piece, file, staging = block.piece, files[block.piece.file], buffer[: block.nbytes]
                if piece.name not in targets:
                    _read(block, file, staging)
                    continue
                stored, target = piece.torch_dtype(), targets[piece.name]
                first = block.start // stored.itemsize
                part = target[first : first + block.nbytes // stored.itemsize]
                if part.dtype == stored:
                    _read(block, file, part.view(torch.uint8))
                else:
                    _read(block, file, staging)
                    part.copy_(staging.view(stored))

    head = blocks[:AHEAD_BLOCKS]
    with _opened([block.piece for block in head]) as files:
        for block in head:
            _prefetch(block, files[block.piece.file])
    run_threads(work, workers)


@contextlib.contextmanager
def _opened(pieces: Sequence[Piece]) -> Iterator[dict[str, io.FileIO]]:
    """The pieces' files for one thread: seek and readinto exist everywhere, and share no offset."""
    with contextlib.ExitStack() as stack:
        paths = {piece.file for piece in pieces}
        yield {path: stack.enter_context(open(path, "rb", buffering=0)) for path in paths}


def _read(block: _Block, file: io.FileIO, target: torch.Tensor) -> None:
    memory = target.numpy().data.cast("B")
    file.seek(block.piece.offset + block.start)
    while memory:
        count = file.readinto(memory)
        if not count:
            raise EOFError(f"{block.piece.file} ended early")
        memory = memory[count:]


def _prefetch(block: _Block, file: io.FileIO) -> None:
    if hasattr(os, "posix_fadvise"):
        start = block.piece.offset + block.start
        os.posix_fadvise(file.fileno(), start, block.nbytes, os.POSIX_FADV_WILLNEED)


def run_threads(work: Callable[[], None], count: int) -> None:
    """Run ``work`` in threads with one torch thread each; the first failure is raised.

    New threads get afterwards what they got before.
    """
    import torch

    failures: list[Exception] = []

    def run() -> None:
        torch.set_num_threads(1)
        try:
            work()
        except Exception as error:
            failures.append(error)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        threads = [threading.Thread(target=run) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    if failures:
        raise failures[0]
