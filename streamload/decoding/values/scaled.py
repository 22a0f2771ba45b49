"""Decodes numbers of few bits with scales: float32 products, each of one number and one scale."""

from __future__ import annotations

from functools import cache

import torch

from streamload.core.dtypes import BY_NAME
from streamload.decoding.scaled import NIBBLES, Scaled
from streamload.decoding.scratch import Parts, Scratch


def decode(encoding: Scaled, parts: Parts, start: int, stop: int, out: torch.Tensor, /) -> None:
    """See ``registry.Decoder``; ``out`` is float32."""
    reads = {at: parts.read(at, *bounds) for at, *bounds in encoding.reads(start, stop)}
    numbers(encoding.code, reads[0], out, parts.scratch, reads.get(encoding.table))
    first, last = start // encoding.columns, stop // encoding.columns
    values = out.view(last - first, encoding.columns)
    across = encoding.block[1]
    if encoding.zeros >= 0:
        zeros = _zeros(encoding, reads[encoding.zeros], first, last)
        each_block(values, zeros, across, torch.Tensor.sub_)
    scales = _of_rows(encoding, plain_scales(reads[1]).view(-1, encoding.grid[1]), first, last)
    if encoding.overall >= 0:
        overall = reads[encoding.overall].float()
        scales = scales / overall if encoding.is_divisor else scales * overall
    each_block(values, scales, across, torch.Tensor.mul_)
    if encoding.factor != 1:
        values.mul_(encoding.factor)
    if encoding.offset:
        values.add_(encoding.offset)


def plain_scales(stored: torch.Tensor) -> torch.Tensor:
    """Scales as float32; bytes are E8M0, powers of two (OCP Microscaling Formats, 5.4.1)."""
    return (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()


def each_block(values: torch.Tensor, grid: torch.Tensor, across: int, do: object) -> None:
    """Combine each row's runs of ``across`` values with the row's number for that run, in place.

    Args:
        values: [rows, columns], contiguous.
        grid: [rows, column blocks].
        across: the last run may be shorter.
        do: ``Tensor.mul_`` or the like.
    """
    assert callable(do)
    rows, columns = values.shape
    if across == 1 or across >= columns:
        do(values, grid)
        return
    count = columns // across
    runs = torch.as_strided(
        values, (rows, count, across), (columns, across, 1), values.storage_offset()
    )
    do(runs, (grid if count == grid.shape[1] else grid[:, :count]).unsqueeze(2))
    if count * across < columns:
        do(values[:, count * across :], grid[:, count:])


def _of_rows(encoding: Scaled, grid: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The rows of ``grid`` that the rows of numbers from ``first`` to ``last`` take."""
    if grid.shape[0] == 1:
        return grid.expand(last - first, -1)
    if encoding.block[0] == 1:
        return grid
    counts = torch.tensor(encoding.rows_of_scales(first, last))
    return grid.repeat_interleave(counts, 0, output_size=last - first)


def _zeros(encoding: Scaled, stored: torch.Tensor, first: int, last: int) -> torch.Tensor:
    rows, each = stored.view(-1, encoding.grid[1]), encoding.zeros_packed
    if each == 1:
        return _of_rows(encoding, rows.float(), first, last)
    apart = [(rows >> 32 // each * at) & ((1 << 32 // each) - 1) for at in range(each)]
    begin = encoding.scale_row(first)
    end = encoding.scale_row(last - 1) + 1
    whole = torch.stack(apart, 1).view(-1, encoding.grid[1])
    skipped = begin // each * each
    return _of_rows(encoding, whole[begin - skipped : end - skipped].float(), first, last)


def numbers(
    code: str,
    stored: torch.Tensor,
    out: torch.Tensor,
    scratch: Scratch,
    listed: torch.Tensor | None = None,
) -> None:
    """Write the numbers to ``out``.

    Two floats are one element of 64 bits: half as many are looked up. That is few calls and about
    the time of shifting bits; torch's own casts of 8-bit floats take about ten times as long.
    """
    if code in ("I8", "U8"):
        out.copy_(stored.view(torch.int8 if code == "I8" else torch.uint8))
        return
    bytes_ = stored.view(torch.uint8)
    if code == "biased8":
        out.copy_(bytes_).sub_(128)
        return
    if listed is not None:
        table = listed.float() if code == "table8" else _pairs(listed.float(), is_low_first=False)
    elif code in NIBBLES:
        table = _nibbles(code)
    elif bytes_.numel() % 2 or bytes_.storage_offset() % 2 or out.storage_offset() % 2:
        table = _floats(code)
    else:
        table, bytes_ = _pairs_of_floats(code), bytes_.view(torch.uint16)
    places = scratch.elements("places", bytes_.numel(), torch.int32)
    torch.index_select(table, 0, places.copy_(bytes_), out=out.view(table.dtype))


@cache
def _nibbles(code: str) -> torch.Tensor:
    """What the two numbers in each byte stand for: 256 pairs of floats, as 64 bits."""
    return _pairs(torch.tensor(NIBBLES[code]), is_low_first=True)


@cache
def _floats(code: str) -> torch.Tensor:
    """What each byte stands for."""
    dtype: torch.dtype = getattr(torch, BY_NAME[code].torch_name or "")
    return torch.arange(256).to(torch.uint8).view(dtype).float()


@cache
def _pairs_of_floats(code: str) -> torch.Tensor:
    """What two bytes next to each other stand for, the first in the lower bits: 65,536 pairs."""
    every, floats = torch.arange(1 << 16), _floats(code)
    return floats[torch.stack((every & 255, every >> 8), 1)].view(torch.int64).view(-1)


def _pairs(values: torch.Tensor, *, is_low_first: bool) -> torch.Tensor:
    """What the two halves of each byte stand for, as 64 bits each."""
    every = torch.arange(256)
    pair = (every & 15, every >> 4) if is_low_first else (every >> 4, every & 15)
    return values[torch.stack(pair, 1)].view(torch.int64).view(256)
