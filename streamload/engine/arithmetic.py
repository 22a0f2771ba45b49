"""Sums of partitions in a type that holds them, and how far values lie apart.

Floating-point values are summed one partition after the other: those of up to 32 bits in float32,
float64 in float64, complex ones in complex of the same width. The result is cast once, to the
target. Integers are summed exactly, whatever their width, and a result that does not fit its type
is an error. Booleans have neither sum nor mean.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_HALF = 32
_LOW = (1 << _HALF) - 1

# A view of the flat target, as (shape, strides, offset), and the values that are added there.
Part = tuple[tuple[tuple[int, ...], tuple[int, ...], int], torch.Tensor]


def is_whole(dtype: torch.dtype) -> bool:
    """True for integers (and booleans), which are compared and summed exactly."""
    return not (dtype.is_floating_point or dtype.is_complex)


def wide_enough(dtype: torch.dtype) -> torch.dtype:
    """The type that values of a floating-point or complex ``dtype`` are summed in."""
    return dtype if dtype.is_complex or dtype == torch.float64 else torch.float32


def summed(parts: Iterable[Part], count: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum of all floating-point parts, flat, of type ``dtype`` (from ``wide_enough``)."""
    total = torch.zeros(count, dtype=dtype).neg_()  # -0.0 changes no value, -0.0 neither
    for view, values in parts:
        torch.as_strided(total, *view).add_(values.to(dtype))
    return total


def whole_sum(
    parts: Iterable[Part], count: int, dtype: torch.dtype, *, divisor: int = 1
) -> torch.Tensor:
    """The exact sum of integers of one ``dtype`` over ``divisor``, flat.

    The upper and the lower 32 bits are summed apart, in 64 bits.

    Raises:
        OverflowError: a result does not fit ``dtype``.
        ArithmeticError: a quotient is not whole.
    """
    high, low = (torch.zeros(count, dtype=torch.int64) for _ in range(2))
    for view, values in parts:
        for total, half in zip((high, low), _halves(values), strict=True):
            torch.as_strided(total, *view).add_(half)
    high += low >> _HALF
    low &= _LOW
    if divisor > 1:
        rest = ((high % divisor) << _HALF) + low
        if bool((rest % divisor).any()):
            raise ArithmeticError(f"their mean is not whole, and {_name(dtype)} holds no fractions")
        high, low = high.div(divisor, rounding_mode="floor"), rest // divisor
    lowest, highest = (0, _LOW) if dtype == torch.uint64 else (-(1 << 31), (1 << 31) - 1)
    fits = (high >= lowest) & (high <= highest)
    result = (high << _HALF) | low
    if dtype == torch.uint64:
        result = result.view(dtype)
    elif dtype != torch.int64:
        info = torch.iinfo(dtype)
        fits &= (result >= info.min) & (result <= info.max)
    if not bool(fits.all()):
        raise OverflowError(f"{int((~fits).sum())} results do not fit {_name(dtype)}")
    return result.to(dtype)


def gaps(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """How far values of one dtype lie apart, in float64: 0 only for those that are equal.

    All of a value counts: the imaginary part, and the last bit of an integer of 64. Two NaNs are
    0 apart, equal infinities too; a NaN and anything else are NaN.
    """
    if is_whole(one.dtype):
        (high, low), (other_high, other_low) = _halves(one), _halves(two)
        return ((high - other_high).double() * (_LOW + 1) + (low - other_low).double()).abs()
    wide = torch.complex128 if one.is_complex() else torch.float64
    first, second = one.to(wide), two.to(wide)
    equal = (first == second) | (first.isnan() & second.isnan())
    return (first - second).abs().masked_fill_(equal, 0.0)


def _halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower 32 bits of integers, the upper ones with the sign, as int64."""
    if values.dtype == torch.uint64:  # torch has hardly any operations for it
        bits = values.contiguous().view(torch.int64)
        return (bits >> _HALF) & _LOW, bits & _LOW
    bits = values.to(torch.int64)
    return bits >> _HALF, bits & _LOW


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
