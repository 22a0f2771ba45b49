"""Fields of a ``config.json`` as the tables read them: null is the default, as in the models."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

# Part of a checkpoint may be loaded: a few tensors of a model with more blocks than that.
LAYERS_ALWAYS_ALLOWED = 10_000


def too_many(layers: int | None, tensors: int) -> bool:
    """True if a table of so many layers is absurd for ``tensors`` tensors: not to be expanded."""
    return layers is not None and layers > max(tensors, LAYERS_ALWAYS_ALLOWED)


def short(value: object) -> str:
    """A value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def truth(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """The field as a bool; absent or null gives the default."""
    value = config.get(name)
    return default if value is None else bool(value)


def whole(config: Mapping[str, Any], name: str, *, least: int = 0) -> int | None:
    """The field as an int of at least ``least``; absent or null gives None.

    Raises:
        ValueError: the field holds something else.
    """
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name!r} must be a whole number of at least {least}: {short(value)}")
    return value


def quantisation(config: Mapping[str, Any] | None) -> str:
    """``quantization_config (gptq)``, or nothing where the configuration has none."""
    text = config.get("text_config") if config else None
    holders = [part for part in (config, text) if isinstance(part, Mapping)]
    for holder, field in product(holders, ("quantization_config", "compression_config")):
        if found := holder.get(field):
            method = found.get("quant_method") if isinstance(found, Mapping) else None
            return f"{field} ({method or 'of an unnamed method'})"
    return ""
