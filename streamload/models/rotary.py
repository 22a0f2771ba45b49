"""Rotary position embedding in half-split form, with the frequency scalings of published models.

The formulas follow transformers' ``modeling_rope_utils``, which defines what the fields
``rope_theta``, ``rope_scaling`` and ``rope_parameters`` of a ``config.json`` mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamload.models.config_fields import flag, number, positive_int

_KNOWN = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """How positions turn into angles.

    ``kind`` is one of default, linear, dynamic, llama3 and yarn; ``scaling`` holds the other
    fields of that kind in the order of the file; ``partial`` is the rotated share of a head.
    ``original`` is the context from which on dynamic frequencies stretch.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float | bool], ...] = ()
    partial: float = 1.0
    original: int = 0

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        max_positions: int,
        theta_name: str = "rope_theta",
        partial_name: str = "partial_rotary_factor",
        partial_default: float = 1.0,
    ) -> Rope:
        """Read the fields at the top of ``config``, or inside its ``rope_parameters``.

        Raises:
            ValueError: a scaling type that is not known, or a field it needs is absent.
        """
        nested = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(nested, Mapping):
            raise ValueError(f"config field 'rope_scaling' must be a table: {nested!r}")
        if any(isinstance(value, Mapping) for value in nested.values()):
            raise ValueError("rotary parameters that differ by layer type are not supported")
        kind = nested.get("rope_type") or nested.get("type") or "default"
        if kind not in _KNOWN:
            known = ", ".join(_KNOWN)
            raise ValueError(f"rotary scaling type {kind!r} is not supported; known: {known}")
        partial = number(config, partial_name, partial_default)
        return cls(
            theta=number(nested, "rope_theta", number(config, theta_name, 10000.0)),
            kind=kind,
            scaling=_scaling(kind, nested, config, max_positions),
            partial=number(nested, "partial_rotary_factor", partial),
            original=max_positions if kind == "dynamic" else 0,
        )

    def to_dict(self) -> dict[str, Any]:
        """``rope_theta`` and ``rope_scaling``, the form that old and new readers take."""
        if self.kind == "default":
            return {"rope_theta": self.theta, "rope_scaling": None}
        scaling = {"rope_type": self.kind, **dict(self.scaling)}
        return {"rope_theta": self.theta, "rope_scaling": scaling}

    def rotary_size(self, head_size: int) -> int:
        """How many leading features of a head are rotated."""
        return int(head_size * self.partial)

    def frequencies(self, size: int, length: int = 0) -> tuple[Tensor, float]:
        """Angles per position, float32 [size / 2] on the CPU, and the factor of cos and sin.

        Dynamic ones are those of a sequence of ``length`` positions.
        """
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
        fields, theta = dict(self.scaling), self.theta
        if self.kind == "dynamic" and length > self.original:
            stretch = fields["factor"] * length / self.original - (fields["factor"] - 1)
            theta *= stretch ** (size / (size - 2))
        powers = theta**exponents
        if self.kind == "linear":
            return 1.0 / powers / fields["factor"], 1.0
        if self.kind == "llama3":
            return _llama3(1.0 / powers, fields), 1.0
        if self.kind == "yarn":
            return _yarn(powers, fields, self.theta, size), fields["attention_factor"]
        return 1.0 / powers, 1.0


def _scaling(
    kind: str, nested: Mapping[str, Any], config: Mapping[str, Any], max_positions: int
) -> tuple[tuple[str, float | bool], ...]:
    if kind == "default":
        return ()
    if kind in ("linear", "dynamic"):
        return (("factor", number(nested, "factor")),)
    # Where both are written, the one at the top is the pretraining length (transformers' rule).
    inside = positive_int(nested, "original_max_position_embeddings", max_positions)
    original = positive_int(config, "original_max_position_embeddings", inside)
    if kind == "llama3":
        low, high = number(nested, "low_freq_factor"), number(nested, "high_freq_factor")
        return (
            ("factor", number(nested, "factor")),
            ("low_freq_factor", low),
            ("high_freq_factor", high),
            ("original_max_position_embeddings", original),
        )
    factor = number(nested, "factor", max_positions / original)
    return (
        ("factor", factor),
        ("original_max_position_embeddings", original),
        ("attention_factor", _yarn_attention(nested, factor)),
        ("beta_fast", number(nested, "beta_fast", 32.0) or 32.0),
        ("beta_slow", number(nested, "beta_slow", 1.0) or 1.0),
        ("truncate", flag(nested, "truncate", True)),
    )


def _yarn_attention(nested: Mapping[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if nested.get("attention_factor") is not None:
        return number(nested, "attention_factor")
    above, below = number(nested, "mscale", 0.0), number(nested, "mscale_all_dim", 0.0)
    return magnitude(above) / magnitude(below) if above and below else magnitude(1.0)


def _llama3(plain: Tensor, fields: Mapping[str, float]) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    factor, original = fields["factor"], fields["original_max_position_embeddings"]
    low, high = fields["low_freq_factor"], fields["high_freq_factor"]
    wavelengths = 2 * math.pi / plain
    if low == high:
        return torch.where(wavelengths > original / low, plain / factor, plain)
    kept = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / factor + kept * plain


def _yarn(powers: Tensor, fields: Mapping[str, float], theta: float, size: int) -> Tensor:
    """Features that turn often over the original length are kept, slow ones interpolated."""
    original = fields["original_max_position_embeddings"]

    def feature(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = feature(fields["beta_fast"]), feature(fields["beta_slow"])
    if fields["truncate"]:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, size - 1.0)
    if low == high:
        high += 0.001
    steps = torch.arange(size // 2, dtype=torch.float32, device="cpu")
    interpolated = ((steps - low) / (high - low)).clamp(0.0, 1.0)
    return interpolated / (fields["factor"] * powers) + (1 - interpolated) / powers


class RotaryTables:
    """Cosines and sines in float32, made from the configuration when they are first needed.

    They are neither parameters nor buffers: no cast of the model reaches them, no checkpoint
    has to hold them, and a model built on the meta device lacks nothing.
    """

    def __init__(self, rope: Rope, size: int) -> None:
        self.rope = rope
        self.size = size
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._longest = rope.original

    def slice(
        self, start: int, count: int, *, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines [count, size] of the positions from ``start``."""
        end = start + count
        self._follow(end)
        tables = self._tables.get(device)
        if tables is None or tables[0].shape[0] < end:
            tables = self._tables[device] = self._make(end, device)
        cos, sin = tables
        return cos[start:end].to(dtype), sin[start:end].to(dtype)

    def _follow(self, end: int) -> None:
        """Dynamic frequencies are the longest sequence's, until one is short again.

        Keys that are cached stay as they were turned: all of this as in transformers.
        """
        if self.rope.kind != "dynamic" or self.rope.original <= end <= self._longest:
            return
        longest = max(end, self.rope.original)
        if longest != self._longest:
            self._longest = longest
            self._tables.clear()

    def _make(self, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        # Tables made inside inference mode could not be used in training afterwards.
        with torch.inference_mode(False), torch.no_grad():
            frequencies, factor = self.rope.frequencies(self.size, self._longest)
            # To the next power of two, so that steps of a generation rarely make new tables.
            length = 1 << max(end - 1, 63).bit_length()
            positions = torch.arange(length, dtype=torch.float32, device="cpu")
            angles = torch.outer(positions, frequencies).repeat(1, 2)
            return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading features of each head of ``x`` [batch, heads, n, head size].

    ``cos`` and ``sin`` are [n, rotated size]; feature i is paired with i + rotated size / 2, the
    half-split form that published files are stored for.
    """
    size = cos.shape[-1]
    turned = x if size == x.shape[-1] else x[..., :size]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)
