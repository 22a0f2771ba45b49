"""Float32 rows turned into columns while they are in the caches, a tile of rows at a time.

torch copies a transposed matrix in squares of 60, each by way of a buffer, at a third of the rate
of a cast. Its channel shuffle moves the same elements by 16 x 16 in vector registers: of one pixel
with ``n x columns`` channels in ``n`` groups it makes ``columns x n``, which is the transposition.
Only float32 has that kernel; other dtypes, and processors without it, take the copy by panels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from streamload.engine.chunks import Chunk, Part

# Of 0.25 to 4 MiB the fastest: what becomes of a tile is still in a cache, and its runs are long.
_TILE_BYTES = 2 << 20
# A tile's rows become so many neighbours in the target: whole cache lines, in any dtype.
_ROWS = 32
_FEWEST_ROWS = 16


@cache
def turns_fast() -> bool:
    """True where torch's channel shuffle of float32 is vectorised."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def columns_to_turn(chunk: Chunk, stored: torch.dtype, chunk_bytes: int) -> int:
    """The length of a staged chunk's rows if it can be turned by tiles; 0 if it cannot.

    Every part then takes whole runs of rows, and neighbours in a column become neighbours in the
    target.
    """
    if stored != torch.float32 or not turns_fast():
        return 0
    columns = chunk.parts[0].source_strides[0]
    if columns < 2 or (chunk.stop - chunk.start) % columns:
        return 0
    if columns * _FEWEST_ROWS * stored.itemsize > chunk_bytes:
        return 0
    for part in chunk.parts:
        inner = zip(part.shape[1:], part.source_strides[1:], strict=True)
        last = part.source_offset % columns + sum([(size - 1) * stride for size, stride in inner])
        # The first dimension goes down the rows, and all others stay inside of one.
        if part.source_strides[0] != columns or part.target_strides[0] != 1 or last >= columns:
            return 0
    return columns


def tiles(
    rows: int, columns: int, chunk_bytes: int, *, at_once: bool = False
) -> Iterator[tuple[int, int]]:
    """``rows`` as runs [start, stop) of at most ``chunk_bytes``, if at all in multiples of 32.

    With ``at_once`` as many as a cache holds, but not too few.
    """
    row_bytes = columns * torch.float32.itemsize
    if at_once:
        chunk_bytes = min(max(_TILE_BYTES, _ROWS * row_bytes), chunk_bytes)
    most = chunk_bytes // row_bytes
    step = max(most // _ROWS * _ROWS, min(most, _ROWS), 1)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def parts_of(parts: Sequence[Part], columns: int, start: int, stop: int) -> Iterator[Part]:
    """What parts of a chunk take of its rows [start, stop), as parts of these rows turned."""
    count = stop - start
    for part in parts:
        first, column = divmod(part.source_offset, columns)
        low, high = max(start, first), min(stop, first + part.shape[0])
        if low < high:
            yield Part(
                part.target,
                (high - low, *part.shape[1:]),
                (1, *(stride * count for stride in part.source_strides[1:])),
                column * count + low - start,
                part.target_strides,
                part.target_offset + low - first,
            )
