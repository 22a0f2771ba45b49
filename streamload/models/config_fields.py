"""Fields of a ``config.json`` as one table for both ways, with errors that name the field.

A reader takes the configuration, a field's name and what an absent or null field means, and
raises a ValueError that names the field if it holds something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

_MOST = 2**63 - 1  # torch counts in 64 bits
_SHOWN = 40
_Config = TypeVar("_Config", bound="ModelConfig")


def published(read: Callable[..., Any], default: Any = None) -> Any:
    """A dataclass field that stands in ``config.json`` under its own name.

    Args:
        read: one of the readers below.
        default: what an absent or null field means.
    """
    return field(default=default, metadata={"read": read})


def _read(
    config: Mapping[str, Any], name: str, default: Any, is_valid: Callable[[Any], bool], what: str
) -> Any:
    # Published files write null for "use the default" as often as they leave a field out.
    value = default if config.get(name) is None else config[name]
    if not is_valid(value):
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
        raise ValueError(f"config field {name!r} must be {what}: {shown}")
    return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return (_is_whole(value) or isinstance(value, float)) and math.isfinite(value)
    except OverflowError:  # a whole number, which JSON allows to be of any size
        return False


def _is_token_ids(value: Any) -> bool:
    return all(map(_is_whole, value)) if isinstance(value, (list, tuple)) else _is_whole(value)


def positive_int(config: Mapping[str, Any], name: str, default: int) -> int:
    """The field as an int from 1 to 2**63 - 1."""
    what = "a whole number of at least 1"
    value: int = _read(config, name, default, lambda n: _is_whole(n) and n >= 1, what)
    return int(_read(config, name, value, lambda n: n <= _MOST, "below 2**63"))


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """The field as a finite float; without a default it must be there."""
    return float(_read(config, name, default, _is_finite, "a finite number"))


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(_read(config, name, default, lambda v: isinstance(v, bool), "true or false"))


def text(config: Mapping[str, Any], name: str, default: str) -> str:
    return str(_read(config, name, default, lambda v: isinstance(v, str), "text"))


def token_ids(
    config: Mapping[str, Any], name: str, default: None = None
) -> int | tuple[int, ...] | None:
    """A token id, several, or None: ``bos_token_id`` and ``eos_token_id``."""
    if config.get(name) is None:
        return default
    value = _read(config, name, default, _is_token_ids, "a token id or a list of them")
    return tuple(value) if isinstance(value, (list, tuple)) else int(value)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base of the models' configurations, frozen dataclasses of ``published`` fields."""

    tie_word_embeddings: bool = published(flag, False)
    bos_token_id: int | tuple[int, ...] | None = published(token_ids)
    eos_token_id: int | tuple[int, ...] | None = published(token_ids)

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
