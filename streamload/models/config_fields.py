"""Fields of a ``config.json`` as one table for both ways, with errors that name the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, ClassVar, TypeVar

__all__ = [
    "ModelConfig",
    "flag",
    "number",
    "positive_int",
    "published",
    "text",
    "token_ids",
]

_MOST = 2**63 - 1  # torch counts in 64 bits
_SHOWN = 40
_Config = TypeVar("_Config", bound="ModelConfig")


def published(read: Callable[..., Any], default: Any = None) -> Any:
    """A dataclass field that stands in ``config.json`` under its own name.

    Args:
        read: one of the readers below, called with the configuration, the name and the default.
        default: what an absent or null field means.
    """
    return field(default=default, metadata={"read": read})


class ModelConfig:
    """Base of the models' configurations, frozen dataclasses of ``published`` fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def from_dict(cls: type[_Config], config: Mapping[str, Any]) -> _Config:
        """Read a ``config.json``.

        Raises:
            ValueError: a field of the wrong kind, sizes that do not fit each other, or a choice
                that is not supported.
        """
        values = {
            f.name: f.metadata["read"](config, f.name, f.default)
            for f in fields(cls)
            if "read" in f.metadata
        }
        return cls(**values | cls._derived(config, values))

    @classmethod
    def _derived(cls, config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        """The attributes that follow from several fields; ``values`` are those read so far."""
        return {}


def _value(config: Mapping[str, Any], name: str, default: Any) -> Any:
    # Published files write null for "use the default" as often as they leave a field out.
    value = config.get(name)
    return default if value is None else value


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


def positive_int(config: Mapping[str, Any], name: str, default: int) -> int:
    """The field as an int from 1 to 2**63 - 1.

    Raises:
        ValueError: the field holds something else.
    """
    value = _value(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"config field {name!r} must be a whole number of at least 1: {_shown(value)}"
        )
    if value > _MOST:
        raise ValueError(f"config field {name!r} must be below 2**63: {_shown(value)}")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """The field as a finite float.

    Raises:
        ValueError: the field holds something else, or is absent and has no default.
    """
    value = _value(config, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise ValueError(f"config field {name!r} must be a finite number: {_shown(value)}")
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number, which JSON allows to be of any size
        return False


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """The field as a bool.

    Raises:
        ValueError: the field holds something else.
    """
    value = _value(config, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"config field {name!r} must be true or false: {value!r}")
    return value


def text(config: Mapping[str, Any], name: str, default: str) -> str:
    """The field as a string.

    Raises:
        ValueError: the field holds something else.
    """
    value = _value(config, name, default)
    if not isinstance(value, str):
        raise ValueError(f"config field {name!r} must be text: {value!r}")
    return value


def token_ids(
    config: Mapping[str, Any], name: str, default: None = None
) -> int | tuple[int, ...] | None:
    """A token id, several, or None: ``bos_token_id`` and ``eos_token_id``.

    Raises:
        ValueError: the field holds something else.
    """
    value = _value(config, name, default)
    if isinstance(value, (list, tuple)) and all(type(one) is int for one in value):
        return tuple(value)
    if value is None or type(value) is int:
        return value
    raise ValueError(f"config field {name!r} must be a token id or a list of them: {value!r}")
