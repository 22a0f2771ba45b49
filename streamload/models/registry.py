"""Which reference model a ``model_type`` of a ``config.json`` means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, cast

from streamload.models.decoder import Decoder
from streamload.models.llama_config import layer_types_of

__all__ = ["MODEL_TYPES", "LayersError", "build_model", "select_layers", "with_layer_count"]

_MODELS = {
    "gpt2": ("streamload.models.gpt", "GPT"),
    "llama": ("streamload.models.llama_model", "Llama"),
    "mistral": ("streamload.models.llama_model", "Llama"),
    "qwen2": ("streamload.models.llama_model", "Llama"),
    "qwen3": ("streamload.models.llama_model", "Llama"),
    "gpt_neox": ("streamload.models.neox_model", "NeoX"),
}
MODEL_TYPES = tuple(_MODELS)


class LayersError(ValueError):
    """Blocks were asked for that the model does not have; its configuration is not at fault."""


def build_model(model_type: str, config: Mapping[str, Any]) -> Decoder:
    """The reference model that ``config`` describes, with random weights, in training mode.

    Args:
        model_type: one of ``MODEL_TYPES``.
        config: the fields of a ``config.json``.

    Raises:
        ValueError: an unknown ``model_type``, or a field the model cannot follow.
    """
    module, name = _MODELS[_known(model_type)]
    made = getattr(import_module(module), name).from_config({**config, "model_type": model_type})
    return cast(Decoder, made)


def with_layer_count(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """``config`` for a model of just its first ``count`` layers.

    Raises:
        ValueError: it has fewer, or its ``model_type`` is unknown.
    """
    return select_layers(config, range(count))


def select_layers(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """``config`` for a model of just these layers (indices from 0), in this order.

    What a layer does by its index stays with it: ``layer_types`` are picked along.

    Raises:
        ValueError: no layers, an index that is not there, an unknown ``model_type``, or a
            configuration whose layers cannot be told apart from their new places.
    """
    name = _layer_count_field(config)
    total = config.get(name)
    wrong = [n for n in layers if n < 0 or (isinstance(total, int) and n >= total)]
    if not layers:
        raise ValueError("layers: at least one block is needed")
    if wrong:
        which = f"{_ranges(wrong)} {'does' if len(wrong) == 1 else 'do'} not exist"
        blocks = f"blocks 0 to {total - 1}" if isinstance(total, int) else "no negative indices"
        raise LayersError(f"layers {which}: this model has {blocks}")
    moved = list(layers) != list(range(len(layers)))
    if moved and config.get("scale_attn_by_inverse_layer_idx"):
        raise ValueError(
            "scale_attn_by_inverse_layer_idx: layers depend on their place and can only be kept "
            "from the first on"
        )
    chosen = {**config, name: len(layers)}
    chosen.pop("layer_types", None)
    types = _layer_types(config)
    if types is not None:
        chosen["layer_types"] = [types[n] for n in layers]
    return chosen


def _ranges(numbers: Sequence[int]) -> str:
    """``12-99, 104``: whole numbers as people list them."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _known(model_type: object) -> str:
    if not isinstance(model_type, str) or model_type not in _MODELS:
        known = ", ".join(MODEL_TYPES)
        raise ValueError(f"model type {model_type!r} has no reference model; known: {known}")
    return model_type


def _layer_count_field(config: Mapping[str, Any]) -> str:
    return "n_layer" if _known(config.get("model_type")) == "gpt2" else "num_hidden_layers"


def _layer_types(config: Mapping[str, Any]) -> list[str] | None:
    """The type of each layer where the family tells layers apart, else None.

    Older Qwen files tell them by index, which the chosen layers no longer have.
    """
    total = config.get("num_hidden_layers")
    if config["model_type"] not in ("qwen2", "qwen3") or not isinstance(total, int):
        return None
    return layer_types_of(config, total)
