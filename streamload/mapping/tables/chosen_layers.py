"""The configuration of a model of only some of a checkpoint's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamload.mapping.tables.registry import layer_count_field, model_class


class LayersError(ValueError):
    """Blocks were asked for that the model does not have; its configuration is not at fault."""


def select_layers(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """``config`` for a model of just these layers (indices from 0), in this order.

    What a layer does by its index stays with it: ``layer_types`` are picked along.

    Raises:
        ValueError: no layers, an index that is not there, a ``model_type`` without a reference
            model, or a configuration whose layers cannot be told apart from their new places.
    """
    model = model_class(config.get("model_type"))
    field = layer_count_field(config["model_type"])
    total = config.get(field)
    absent = [n for n in layers if n < 0 or (isinstance(total, int) and n >= total)]
    if not layers:
        raise ValueError("layers: at least one block is needed")
    if absent:
        which = f"{_ranges(absent)} {'does' if len(absent) == 1 else 'do'} not exist"
        blocks = f"blocks 0 to {total - 1}" if isinstance(total, int) else "no negative indices"
        raise LayersError(f"layers {which}: this model has {blocks}")
    moved = list(layers) != list(range(len(layers)))
    if moved and config.get("scale_attn_by_inverse_layer_idx"):
        raise ValueError(
            "scale_attn_by_inverse_layer_idx: layers depend on their place and can only be kept "
            "from the first on"
        )
    chosen = {**config, field: len(layers)}
    chosen.pop("layer_types", None)
    types = model.layer_types(config)
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
