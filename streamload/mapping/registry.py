"""``model_type`` → the functions that make its tables. A new architecture is one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from streamload.mapping.rules import NameMap
from streamload.mapping.tables.gpt2_names import gpt2_map
from streamload.mapping.tables.llama_names import llama_map, llama_meta_map
from streamload.mapping.tables.neox_names import neox_map, neox_raw_map

__all__ = ["known_model_types", "mapping_for", "mappings_for"]

_Table: TypeAlias = Callable[[Mapping[str, Any]], NameMap]
_LLAMA = (llama_map, llama_meta_map)

# The published names come first; the others are further forms that files of the type have.
_TABLES: dict[str, tuple[_Table, ...]] = {
    "gpt2": (gpt2_map,),
    "gpt_neox": (neox_map, neox_raw_map),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": (llama_map,),
    "qwen3": (llama_map,),
}


def known_model_types() -> tuple[str, ...]:
    """The model types there are tables for."""
    return tuple(sorted(_TABLES))


def mapping_for(model_type: str, config: Mapping[str, Any]) -> NameMap:
    """The table of an architecture's published names.

    Args:
        model_type: as in ``config.json``.
        config: the dict in ``config.json``.

    Raises:
        ValueError: there is no table for ``model_type``.
    """
    return _tables(model_type)[0]({**config, "model_type": model_type})


def mappings_for(model_type: str, config: Mapping[str, Any]) -> tuple[NameMap, ...]:
    """All tables of an architecture that the configuration suffices for, published names first.

    Raises:
        ValueError: there is no table for ``model_type``.
    """
    made: list[NameMap] = []
    for table in _tables(model_type):
        try:
            made.append(table({**config, "model_type": model_type}))
        except (KeyError, TypeError, ValueError, ArithmeticError):
            # A config that cannot be followed does not stop a load by other names.
            continue
    return tuple(made)


def _tables(model_type: str) -> tuple[_Table, ...]:
    tables = _TABLES.get(model_type)
    if tables is None:
        raise ValueError(
            f"no name table for model_type {model_type!r}; known: {', '.join(known_model_types())}"
        )
    return tables
