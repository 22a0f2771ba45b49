"""The decoders of GGUF's blocks, equal bit for bit to those of the ``gguf`` package.

Blocks come as rows of bytes [n, bytes], values go out as float32 [n, elements]. Each formula is
computed in the reference's order (a scale times a number, then the minimum), without fused steps.

Numbers of a few bits are taken apart four bytes at a time: shifting a 32-bit word and masking each
of its bytes is the same as shifting the bytes. Numbers that lie side by side in one byte stand far
apart among the values; what is taken apart stays in runs as long as can be until it is written,
since torch's loops over a few elements cost more than the arithmetic.

Source of the layouts: the structs of ggml's ``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from streamload.decoding.blocks import Blocks
from streamload.decoding.scratch import Parts

_EACH = 0x01010101


def decode(encoding: Blocks, parts: Parts, start: int, stop: int, out: torch.Tensor) -> None:
    """See ``decoding.registry.Decoder``."""
    ((part, first, last),) = encoding.reads(start, stop)
    blocks = parts.read(part, first, last).view(-1, encoding.nbytes)
    _DECODERS[encoding.type](blocks, out.view(-1, encoding.elements))


def _copied(stored: Tensor) -> Tensor:
    """The bytes one after the other, at an address that larger elements may have."""
    return stored.clone(memory_format=torch.contiguous_format)


def _floats(stored: Tensor) -> Tensor:
    """Float16 in bytes [n, 2 k] as float32 [n, k]."""
    return _copied(stored).view(torch.float16).float()


def _words(stored: Tensor) -> Tensor:
    """Bytes [n, 4 k] as 32-bit words [n, k]."""
    return _copied(stored).view(torch.int32)


def _fields(words: Tensor, shift: int, bits: int, to: int = 0) -> Tensor:
    """The ``bits`` from ``shift`` on of each byte, moved to those from ``to`` on."""
    mask = (((1 << bits) - 1) << to) * _EACH
    if shift == to:
        return words & mask
    return (words >> shift - to if shift > to else words << to - shift).bitwise_and_(mask)


def _several(words: Tensor, shifts: tuple[int, ...], bits: int, to: int = 0) -> Tensor:
    """``_fields`` for each of the shifts, side by side: [n, ..., k] to [n, ..., shifts, k]."""
    return torch.stack([_fields(words, shift, bits, to) for shift in shifts], -2)


def _join(numbers: Tensor, words: Tensor, shifts: tuple[int, ...], bits: int, to: int) -> None:
    """Put ``_several`` into numbers [n, ..., shifts, k] that lack these bits.

    One by one: a loop over all of them at once is one over a few words at a time.
    """
    for place, shift in enumerate(shifts):
        numbers.select(-2, place).bitwise_or_(_fields(words, shift, bits, to))


def _bytes(words: Tensor, zero: int = 0) -> Tensor:
    """Words as their bytes [n, 4 k], signed where ``zero`` is taken off; the words are given up."""
    numbers = words.view(torch.uint8)
    return numbers.sub_(zero).view(torch.int8) if zero else numbers


def _put(out: Tensor, place: int, runs: int, numbers: Tensor) -> None:
    """Numbers to their places: each run of values is ``runs`` of theirs, one after the other.

    Args:
        out: [n, elements].
        place: which of the runs they are.
        runs: how many there are.
        numbers: [n, k, length], bytes.
    """
    n, count, length = numbers.shape
    out.view(n, count, runs, length)[:, :, place].copy_(numbers)


def _scale(out: Tensor, scales: Tensor, minima: Tensor | None = None) -> None:
    """Values times ``scales`` [n, k], minus ``minima`` [n, k]; each is of elements / k values."""
    view = out.view(*scales.shape, -1).mul_(scales.unsqueeze(-1))
    if minima is not None:
        view.sub_(minima.unsqueeze(-1))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_floats(blocks[:, :2]))


def _nibbles(stored: Tensor, out: Tensor, zero: int = 0, fifth: Tensor | None = None) -> None:
    """The low halves of 16 bytes, then the high ones; with fifth bits of their own, if any."""
    words = _words(stored)
    for place in (0, 1):
        numbers = _fields(words, 4 * place, 4)
        if fifth is not None:
            numbers.bitwise_or_(fifth[:, 4 * place : 4 * place + 4])
        _put(out, place, 2, _bytes(numbers, zero).unsqueeze(1))


@lru_cache(maxsize=1)
def _spread_bits() -> Tensor:
    """For each byte, the 8 bytes that are 16 where one of its bits is set, lowest bit first."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return (bits * 16).to(torch.uint8).view(torch.int64).squeeze(1)


def _fifth_bits(stored: Tensor) -> Tensor:
    """32 bits in 4 bytes as words [n, 8] of four bytes each, which are 16 or 0."""
    return _spread_bits()[stored.to(torch.int32)].view(torch.int32)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out, 8)
    _scale(out, _floats(blocks[:, :2]))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    _scale_and_add(blocks, out)


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out, 16, _fifth_bits(blocks[:, 2:6]))
    _scale(out, _floats(blocks[:, :2]))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out, 0, _fifth_bits(blocks[:, 4:8]))
    _scale_and_add(blocks, out)


def _scale_and_add(blocks: Tensor, out: Tensor) -> None:
    both = _floats(blocks[:, :4])
    out.mul_(both[:, :1]).add_(both[:, 1:])


# What the numbers of IQ4_NL stand for.
_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    stands_for = torch.tensor(_UNEVEN, dtype=torch.float32)
    words = _words(blocks[:, 2:])
    for place in (0, 1):
        numbers = _bytes(_fields(words, 4 * place, 4))
        _put(out, place, 2, stands_for[numbers.int()].unsqueeze(1))
    _scale(out, _floats(blocks[:, :2]))


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    words = _words(blocks[:, 16:80])
    for place in range(4):
        _put(out, place, 4, _bytes(_fields(words, 2 * place, 2)).view(-1, 2, 32))
    packed, both = _words(blocks[:, :16]), _floats(blocks[:, 80:84])
    scales, minima = (_bytes(_fields(packed, shift, 4)) for shift in (0, 4))
    _scale(out, scales * both[:, :1], minima * both[:, 1:])


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    words = _words(blocks[:, 32:96]).view(-1, 2, 8)
    # The third bit is set where nothing is taken off; those of a place are four bits apart.
    third = _words(blocks[:, :32])
    for place in range(4):
        numbers = _fields(words, 2 * place, 2)
        _join(numbers, third, (place, 4 + place), 1, 2)
        _put(out, place, 4, _bytes(numbers, 4))
    packed = _words(blocks[:, 96:108])
    lower = _several(packed[:, :2], (0, 4), 4).view(-1, 4)
    upper = _several(packed[:, 2:], (0, 2, 4, 6), 2, 4).view(-1, 4)
    _scale(out, _bytes(lower.bitwise_or_(upper), 32) * _floats(blocks[:, 108:]))


def _scale_eighths(blocks: Tensor, out: Tensor) -> None:
    """Scales and minima of the eight runs of a block are in its first 16 bytes (Q4_K, Q5_K)."""
    packed = _words(blocks[:, 4:16])
    of_four, rest = packed[:, :2], packed[:, 2:]
    others = _several(rest, (0, 4), 4).view(-1, 2)
    others.bitwise_or_(_fields(of_four, 6, 2, 4))
    numbers = _bytes(torch.stack((_fields(of_four, 0, 6), others), 2)).view(-1, 2, 8)
    scales, minima = (numbers * _floats(blocks[:, :4]).unsqueeze(2)).unbind(1)
    _scale(out, scales, minima)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    words = _words(blocks[:, 16:])
    for place in (0, 1):
        _put(out, place, 2, _bytes(_fields(words, 4 * place, 4)).view(-1, 4, 32))
    _scale_eighths(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    words = _words(blocks[:, 48:]).view(-1, 4, 8)
    fifth = _words(blocks[:, 16:48])
    for place in (0, 1):
        numbers = _fields(words, 4 * place, 4)
        _join(numbers, fifth, (place, 2 + place, 4 + place, 6 + place), 1, 4)
        _put(out, place, 2, _bytes(numbers))
    _scale_eighths(blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    words = _words(blocks[:, :128]).view(-1, 2, 2, 8)
    upper = _words(blocks[:, 128:192]).view(-1, 2, 8)
    for place in (0, 1):
        numbers = _fields(words, 4 * place, 4)
        _join(numbers, upper, (4 * place, 4 * place + 2), 2, 4)
        _put(out, place, 2, _bytes(numbers, 32).view(-1, 2, 64))
    _scale(out, blocks[:, 192:208].view(torch.int8) * _floats(blocks[:, 208:]))


_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
