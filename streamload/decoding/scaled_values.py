"""Decodes numbers of few bits with scales: float32 products, each of one number and one scale."""

from __future__ import annotations

from functools import cache

import torch

from streamload.core.dtypes import BY_NAME
from streamload.decoding.scaled import Scaled
from streamload.decoding.scratch import Parts, Scratch

# What float16 makes of an E4M3 number's bits is this much too small: the biases are 15 and 7.
_E4M3_BIAS = 256.0


def decode(encoding: Scaled, parts: Parts, start: int, stop: int, out: torch.Tensor, /) -> None:
    """See ``registry.Decoder``; ``out`` is float32."""
    columns = encoding.columns
    reads = {
        part: parts.read(part, first, last) for part, first, last in encoding.reads(start, stop)
    }
    factor = _numbers(encoding.code, reads[0], out, parts.scratch)
    first, last = start // columns, stop // columns
    scales = _of_rows(encoding, reads[1].float().view(-1, encoding.grid[1]), first, last)
    values = out.view(last - first, columns)
    if factor != 1:
        scaled = scales * factor
        # The product is the same as long as the factor itself takes no scale out of range.
        if bool(torch.isfinite(scaled).all()):
            scales = scaled
        else:
            values.mul_(factor)
    across = encoding.block[1]
    whole = columns // across * across
    if whole == columns == across:
        values.mul_(scales)
        return
    count = columns // across
    shape, strides = (last - first, count, across), (columns, across, 1)
    torch.as_strided(values, shape, strides, values.storage_offset()).mul_(scales[:, :count, None])
    if whole < columns:
        values[:, whole:].mul_(scales[:, count:])


def _of_rows(encoding: Scaled, scales: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The scales of each row of numbers from ``first`` to ``last``."""
    if encoding.block[0] == 1 and encoding.rows == encoding.grid[0]:
        return scales
    rows = torch.arange(first, last)
    at = rows // encoding.rows * encoding.grid[0] + rows % encoding.rows // encoding.block[0]
    return scales.index_select(0, at.sub_(encoding.scale_row(first)))


def _numbers(code: str, stored: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> float:
    """Write the numbers to ``out``, short of the factor that is returned.

    torch's own casts of 8-bit floats take about ten times as long as these.
    """
    if code in ("F8_E4M3", "F8_E5M2"):
        return _eight_bits(code, stored, out, scratch)
    if code in ("I8", "U8"):
        out.copy_(stored)
        return 1.0
    places = scratch.elements("places", stored.numel(), torch.int32)
    places.copy_(stored.view(torch.uint8))
    table = _table(code)
    torch.index_select(table, 0, places, out=out.view(-1, *table.shape[1:]))
    return 1.0


def _eight_bits(code: str, stored: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> float:
    """By way of float16, whose bits they are but for their place and the exponent's bias."""
    halves = scratch.elements("halves", stored.numel(), torch.int16)
    signed = stored.view(torch.int8)
    halves.copy_(signed)
    if code == "F8_E5M2":
        out.copy_(halves.bitwise_left_shift_(8).view(torch.float16))
        return 1.0
    halves.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    out.copy_(halves.view(torch.float16))
    # 0x7F and 0xFF are NaN, and nothing else is as large as what they have become.
    if int(signed.max()) == 0x7F or int(stored.view(torch.uint8).max()) == 0xFF:
        out.masked_fill_(out.abs() > 448 / _E4M3_BIAS, float("nan"))
    return _E4M3_BIAS


@cache
def _table(code: str) -> torch.Tensor:
    """What each byte stands for: [256], or [256, 2] where it holds two numbers."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    dtype: torch.dtype = getattr(torch, BY_NAME[code].torch_name or "")
    return every.view(dtype).float()
