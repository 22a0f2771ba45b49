"""LLaMA 3's rotary scaling, read off the factors that a GGUF file has for it.

The rule is that of transformers' ``llama3`` scaling: wavelengths above ``original / low`` are
stretched by the factor, those below ``original / high`` are kept, between them it is blended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_ORIGINAL = 8192
# Factors are float32, made of float32 wavelengths.
_TOLERANCE = 1e-4


def llama3_scaling(factors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """``rope_scaling`` for these factors, one for each pair of a head; None if all are 1.

    Raises:
        ValueError: no such scaling makes them.
    """
    factor = max(factors, default=1.0)
    if not all(math.isfinite(one) and one > 0 for one in factors):
        raise ValueError("the rotary factors are not finite positive numbers")
    if all(one == 1.0 for one in factors):
        return None
    waves = [2 * math.pi * theta ** (at / len(factors)) for at in range(len(factors))]
    for fields in (_scaling(factor, 1.0, 4.0, _ORIGINAL), _fitted(factors, waves, factor)):
        if fields is not None and _fits(fields, factors, waves):
            return fields
    raise ValueError(
        f"the rotary factors {[round(one, 4) for one in factors[:8]]}... are not those of "
        "LLaMA 3's scaling, which is the only one with factors that is known"
    )


def _scaling(factor: float, low: float, high: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": float(round(factor, 4)),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _fitted(
    factors: Sequence[float], waves: Sequence[float], factor: float
) -> dict[str, Any] | None:
    """The scaling through the first and the last blended wavelength."""
    # The share of what is kept is a straight line over 1 / wavelength.
    blended = [
        (1 / wave, (1 / one - 1 / factor) / (1 - 1 / factor))
        for one, wave in zip(factors, waves, strict=True)
        if 1.0 < one < factor
    ]
    if len(blended) < 2:
        return None
    (x0, y0), (x1, y1) = blended[0], blended[-1]
    slope = (y1 - y0) / (x1 - x0)
    start = slope * x0 - y0  # low / (high - low)
    if slope <= 0 or start <= 0:
        return None
    high = 1 + 1 / start
    return _scaling(factor, 1.0, high, round(slope * (high - 1)))


def _fits(fields: dict[str, Any], factors: Sequence[float], waves: Sequence[float]) -> bool:
    factor, original = fields["factor"], fields["original_max_position_embeddings"]
    low, high = fields["low_freq_factor"], fields["high_freq_factor"]
    for found, wave in zip(factors, waves, strict=True):
        kept = min(max((original / wave - low) / (high - low), 0.0), 1.0)
        made = 1 / ((1 - kept) / factor + kept)
        if abs(made - found) > _TOLERANCE * found:
            return False
    return True
