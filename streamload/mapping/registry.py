"""``model_type`` → the function that makes its table. A new architecture is one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streamload.mapping.gpt2 import gpt2_map
from streamload.mapping.rules import NameMap

__all__ = ["known_model_types", "mapping_for"]

_TABLES: dict[str, Callable[[Mapping[str, Any]], NameMap]] = {
    "gpt2": gpt2_map,
}


def known_model_types() -> tuple[str, ...]:
    """The model types there are tables for."""
    return tuple(sorted(_TABLES))


def mapping_for(model_type: str, config: Mapping[str, Any]) -> NameMap:
    """The table of an architecture.

    Args:
        model_type: as in ``config.json``.
        config: the dict in ``config.json``.

    Raises:
        ValueError: there is no table for ``model_type``.
    """
    table = _TABLES.get(model_type)
    if table is None:
        raise ValueError(
            f"no name table for model_type {model_type!r}; known: {', '.join(known_model_types())}"
        )
    return table(config)
