"""Reading single fields of a ``config.json``, with errors that name the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["flag", "number", "optional_id", "positive_int", "text"]


_MOST = 2**63 - 1  # torch counts in 64 bits
_SHOWN = 40


def _absent(config: Mapping[str, Any], name: str) -> bool:
    # Published files write null for "use the default" as often as they leave a field out.
    return config.get(name) is None


def positive_int(config: Mapping[str, Any], name: str, default: int) -> int:
    """The field as an int from 1 to 2**63 - 1; absent or null gives the default.

    Raises:
        ValueError: the field holds something else.
    """
    value = default if _absent(config, name) else config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"config field {name!r} must be a whole number of at least 1: {_shown(value)}"
        )
    if value > _MOST:
        raise ValueError(f"config field {name!r} must be below 2**63: {_shown(value)}")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """The field as a finite float; absent or null gives the default.

    Raises:
        ValueError: the field holds something else, or is absent and has no default.
    """
    value = default if _absent(config, name) else config[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise ValueError(f"config field {name!r} must be a finite number: {_shown(value)}")
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number, which JSON allows to be of any size
        return False


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """The field as a bool; absent or null gives the default.

    Raises:
        ValueError: the field holds something else.
    """
    value = default if _absent(config, name) else config[name]
    if not isinstance(value, bool):
        raise ValueError(f"config field {name!r} must be true or false: {value!r}")
    return value


def text(config: Mapping[str, Any], name: str, default: str) -> str:
    """The field as a string; absent or null gives the default.

    Raises:
        ValueError: the field holds something else.
    """
    value = default if _absent(config, name) else config[name]
    if not isinstance(value, str):
        raise ValueError(f"config field {name!r} must be text: {value!r}")
    return value


def optional_id(config: Mapping[str, Any], name: str) -> int | tuple[int, ...] | None:
    """A token id, several, or None: ``bos_token_id`` and ``eos_token_id``.

    Raises:
        ValueError: the field holds something else.
    """
    value = config.get(name)
    if isinstance(value, (list, tuple)) and all(type(one) is int for one in value):
        return tuple(value)
    if value is None or type(value) is int:
        return value
    raise ValueError(f"config field {name!r} must be a token id or a list of them: {value!r}")
