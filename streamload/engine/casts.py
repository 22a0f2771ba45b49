"""Which casts can overflow, and how overflows are counted cheaply."""

from __future__ import annotations

from functools import cache

import torch

# torch has no sum() for the 8-bit floats; they are looked at through float32.
_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Has no infinity: torch turns all that is too large into its largest value.
_SATURATING = (torch.float8_e4m3fn,)


def saturates(target: torch.dtype) -> bool:
    """True if what is too large for ``target`` becomes its largest value, which looks sound."""
    return target in _SATURATING


def saturated(source: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Where ``source`` is finite and beyond the largest value of ``target`` (a BOOL tensor)."""
    wide = _wide(source)
    return torch.isfinite(wide) & (wide.abs() > torch.finfo(target).max)


@cache
def can_overflow(stored: torch.dtype, target: torch.dtype) -> bool:
    """True if a finite value of ``stored`` may be too large for ``target``."""
    if stored == target or not (stored.is_floating_point and target.is_floating_point):
        return False
    return torch.finfo(stored).max > torch.finfo(target).max


def count_overflows(source: torch.Tensor, cast: torch.Tensor) -> int:
    """Finite values of ``source`` that are not finite in ``cast``, or cut to its largest value
    (equal shapes).

    A sum is the sentinel: it is finite only if every value is. It costs a tenth of an exact
    count, which is made only where it is not (also where the values merely add up to infinity).
    """
    lost = overflowed(source, cast)
    return 0 if lost is None else int(lost.sum())


def may_overflow(values: torch.Tensor, target: torch.dtype) -> bool:
    """False if a glance at all float32 ``values`` (flat) shows that none overflows ``target``.

    No value is larger than the root of the sum of their squares, which is one pass at the rate of
    a sum; half of it is left for what rounding takes from that.
    """
    if not can_overflow(values.dtype, target):
        return False
    largest = torch.finfo(target).max
    bound = min(largest * largest, torch.finfo(torch.float32).max)
    return not bool(torch.dot(values, values) <= bound / 2)  # NaN is not known to fit


def overflowed(source: torch.Tensor, cast: torch.Tensor) -> torch.Tensor | None:
    """True where a finite value became infinite or NaN; None where a glance shows there is none."""
    if cast.dtype in _SUMMABLE and bool(torch.isfinite(cast.sum())):
        return None
    if saturates(cast.dtype):
        return saturated(source, cast.dtype)
    return torch.isfinite(_wide(source)) & ~torch.isfinite(cast.float())


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype.itemsize == 1 else values
