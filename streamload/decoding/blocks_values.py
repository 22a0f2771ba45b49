"""The decoders of GGUF's blocks, equal bit for bit to those of the ``gguf`` package.

Blocks come as rows of bytes [n, bytes], values go out as float32 [n, elements]. Each formula is
computed in the reference's order (a scale times a number, then the minimum), without fused steps.
Numbers of a few bits are taken apart four bytes at a time: shifting a 32-bit word and masking each
of its bytes is the same as shifting the bytes, and four times less work.

Source of the layouts: the structs of ggml's ``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from streamload.decoding.blocks import Blocks
from streamload.decoding.scratch import Parts

_BYTES = 0x01010101


def decode(encoding: Blocks, parts: Parts, start: int, stop: int, out: torch.Tensor) -> None:
    """See ``decoding.registry.Decoder``."""
    ((part, first, last),) = encoding.reads(start, stop)
    blocks = parts.read(part, first, last).view(-1, encoding.nbytes)
    _DECODERS[encoding.type](blocks, out.view(-1, encoding.elements))


def _floats(stored: Tensor) -> Tensor:
    """Float16 in bytes [n, 2 k] as float32 [n, k]."""
    return _copied(stored).view(torch.float16).float()


def _copied(stored: Tensor) -> Tensor:
    """The bytes one after the other, at an address that larger elements may have."""
    return stored.clone(memory_format=torch.contiguous_format)


def _fields(stored: Tensor, group: int, bits: int, count: int) -> Tensor:
    """Numbers of a few bits of each byte, lowest bits first, as bytes.

    Args:
        stored: [n, bytes].
        group: so many bytes have their first numbers before all of their second ones.
        bits: of one number.
        count: numbers in a byte.

    Returns:
        32-bit words [n, bytes / group, count, group / 4] of four numbers each.
    """
    words = _copied(stored).view(torch.int32)
    words = words.view(stored.shape[0], -1, 1, group // 4)
    shifts = torch.arange(0, bits * count, bits, dtype=torch.int32).view(-1, 1)
    return (words >> shifts).bitwise_and_(((1 << bits) - 1) * _BYTES)


def _scaled(out: Tensor, numbers: Tensor, scales: Tensor, minima: Tensor | None = None) -> None:
    """``scales`` [n, k] times ``numbers``, minus ``minima`` [n, k]; each for elements / k."""
    view = out.view(*scales.shape, -1)
    view.copy_(numbers.view(view.shape)).mul_(scales.unsqueeze(-1))
    if minima is not None:
        view.sub_(minima.unsqueeze(-1))


def _signed(words: Tensor, zero: int) -> Tensor:
    """Bytes minus ``zero``."""
    return words.view(torch.uint8).sub_(zero).view(torch.int8)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_floats(blocks[:, :2]))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _scaled(out, _signed(_fields(blocks[:, 2:], 16, 4, 2), 8), _floats(blocks[:, :2]))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    both = _floats(blocks[:, :4])
    _scaled(out, _fields(blocks[:, 4:], 16, 4, 2).view(torch.uint8), both[:, :1])
    out.add_(both[:, 1:])


def _fifth_bits(stored: Tensor, bits: Tensor) -> Tensor:
    """Nibbles [n, 16 bytes] with a fifth bit from [n, 4], where each byte has eight."""
    places = torch.arange(8, dtype=torch.uint8)
    fifth = (bits.unsqueeze(-1) >> places).bitwise_and_(1).bitwise_left_shift_(4)
    words = _fields(stored, 16, 4, 2).view(-1, 8)
    return words.bitwise_or_(fifth.view(-1, 32).view(torch.int32))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    words = _fifth_bits(blocks[:, 6:], blocks[:, 2:6])
    _scaled(out, _signed(words, 16), _floats(blocks[:, :2]))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    both = _floats(blocks[:, :4])
    words = _fifth_bits(blocks[:, 8:], blocks[:, 4:8])
    _scaled(out, words.view(torch.uint8), both[:, :1])
    out.add_(both[:, 1:])


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    packed, both = blocks[:, :16], _floats(blocks[:, 80:84])
    numbers = _fields(blocks[:, 16:80], 32, 2, 4).view(torch.uint8)
    _scaled(out, numbers, (packed & 15) * both[:, :1], (packed >> 4) * both[:, 1:])


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    upper = torch.cat((high, high >> 2, high >> 4, high >> 6), 1) & 3
    scales = torch.cat((low & 15, low >> 4), 1) | upper << 4
    words = _fields(blocks[:, 32:96], 32, 2, 4).view(-1, 1, 8, 8)
    words.bitwise_or_(_fields(blocks[:, :32], 32, 1, 8).bitwise_left_shift_(2))
    # The third bit is set where nothing is taken off.
    _scaled(out, _signed(words, 4), _signed(scales, 32) * _floats(blocks[:, 108:]))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the eight runs of a block, from its first 16 bytes (Q4_K, Q5_K)."""
    both = _floats(blocks[:, :4])
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), 1)
    return scales * both[:, :1], minima * both[:, 1:]


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _scaled(out, _fields(blocks[:, 16:], 32, 4, 2).view(torch.uint8), *_scales_and_minima(blocks))


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    words = _fields(blocks[:, 48:], 32, 4, 2).view(-1, 1, 8, 8)
    words.bitwise_or_(_fields(blocks[:, 16:48], 32, 1, 8).bitwise_left_shift_(4))
    _scaled(out, words.view(torch.uint8), *_scales_and_minima(blocks))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    words = _fields(blocks[:, :128], 64, 4, 2).view(-1, 2, 4, 8)
    words.bitwise_or_(_fields(blocks[:, 128:192], 32, 2, 4).bitwise_left_shift_(4))
    scales = blocks[:, 192:208].view(torch.int8) * _floats(blocks[:, 208:])
    _scaled(out, _signed(words, 32), scales)


_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
