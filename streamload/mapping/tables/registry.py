"""Everything that is known of a ``model_type``: one row here for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from streamload.core.specs import Shape
from streamload.mapping.rules import NameMap
from streamload.mapping.tables.gpt2_names import gpt2_map
from streamload.mapping.tables.llama_names import fused_local_map, llama_map, llama_meta_map
from streamload.mapping.tables.neox_names import neox_map, neox_raw_map
from streamload.mapping.tables.olmo2_names import olmo2_map, olmo2_shapes
from streamload.mapping.tables.shapes import weight_shapes

if TYPE_CHECKING:
    from streamload.models.decoder import Decoder

_Table: TypeAlias = Callable[[Mapping[str, Any]], NameMap]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    Attributes:
        tables: functions from a ``config.json`` to a table: the published names first, then
            further forms that files of the type have.
        model: ``"module:Class"`` of the reference model, imported when it is first built; None
            if there are only tables.
        layer_count_field: the field of ``config.json`` that says how many blocks there are.
        shapes: function from a ``config.json`` to the shapes of the model's weights.
    """

    tables: tuple[_Table, ...]
    model: str | None = None
    layer_count_field: str = "num_hidden_layers"
    shapes: Callable[[Mapping[str, Any]], dict[str, Shape]] = weight_shapes


_LLAMA = "streamload.models.llama_model:Llama"
_META = (llama_map, llama_meta_map, fused_local_map)
_QWEN = (llama_map, fused_local_map)
ARCHITECTURES = {
    "gpt2": Architecture((gpt2_map,), "streamload.models.gpt:GPT", "n_layer"),
    "llama": Architecture(_META, _LLAMA),
    "mistral": Architecture(_META, _LLAMA),
    "qwen2": Architecture(_QWEN, _LLAMA),
    "qwen3": Architecture(_QWEN, _LLAMA),
    "gpt_neox": Architecture((neox_map, neox_raw_map), "streamload.models.neox_model:NeoX"),
    "olmo2": Architecture((olmo2_map,), "streamload.models.olmo2_model:Olmo2", shapes=olmo2_shapes),
}


def known_model_types(*, with_model: bool = False) -> tuple[str, ...]:
    """The model types there are tables for; or only those with a reference model, too."""
    return tuple(sorted(t for t, row in ARCHITECTURES.items() if row.model or not with_model))


def layer_count_field(model_type: object) -> str:
    """The field of ``config.json`` that says how many blocks there are."""
    row = _row(model_type)
    return row.layer_count_field if row else "num_hidden_layers"


def _row(model_type: object) -> Architecture | None:
    return ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None


def _check_config(config: Any) -> None:
    if not isinstance(config, Mapping):
        what = ": config() of a source gives it and notices" if isinstance(config, tuple) else ""
        kind = type(config).__name__
        raise TypeError(f"config must be the dict in config.json, not {kind}{what}")


def mapping_for(model_type: str, config: Mapping[str, Any]) -> NameMap:
    """The table of an architecture's published names.

    Args:
        model_type: as in ``config.json``.
        config: the dict in ``config.json``.

    Raises:
        ValueError: there is no table for ``model_type``.
    """
    _check_config(config)
    return _tables(model_type)[0]({**config, "model_type": model_type})


def mappings_for(model_type: str, config: Mapping[str, Any]) -> tuple[NameMap, ...]:
    """All tables of an architecture that the configuration suffices for, published names first.

    Raises:
        ValueError: there is no table for ``model_type``.
    """
    name_maps: list[NameMap] = []
    for table in _tables(model_type):
        try:
            name_maps.append(table({**config, "model_type": model_type}))
        except (KeyError, TypeError, ValueError, ArithmeticError):
            # A config that cannot be followed does not stop a load by other names.
            continue
    return tuple(name_maps)


def _tables(model_type: str) -> tuple[_Table, ...]:
    if model_type not in ARCHITECTURES:
        known = ", ".join(known_model_types())
        raise ValueError(f"no name table for model_type {model_type!r}; known: {known}")
    return ARCHITECTURES[model_type].tables


def model_class(model_type: object) -> type[Decoder]:
    """The reference model's class.

    Raises:
        ValueError: ``model_type`` has no reference model.
    """
    row = _row(model_type)
    if row is None or row.model is None:
        known = ", ".join(known_model_types(with_model=True))
        raise ValueError(f"model type {model_type!r} has no reference model; known: {known}")
    module, _, name = row.model.partition(":")
    model: type[Decoder] = getattr(import_module(module), name)
    return model


def build_model(model_type: str, config: Mapping[str, Any]) -> Decoder:
    """The reference model that ``config`` describes, with random weights, in training mode.

    Args:
        model_type: as in ``config.json``.
        config: the fields of a ``config.json``.

    Raises:
        ValueError: ``model_type`` has no reference model, or a field has a value that the model
            does not support.
    """
    return model_class(model_type).from_config({**config, "model_type": model_type})
