"""The configuration a model is built from: what the source says, else what names and shapes say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from streamload.core.errors import CheckpointError, PlanError
from streamload.core.specs import Catalog
from streamload.core.wording import printable
from streamload.mapping.binding import bind_table
from streamload.mapping.fields import LAYERS_ALWAYS_ALLOWED, short
from streamload.mapping.tables.gpt2_names import gpt2_map
from streamload.mapping.tables.registry import known_model_types, layer_count_field

# As ``Source.config()`` gives it: the configuration, if one is known, and notices about it.
_Found: TypeAlias = tuple[dict[str, Any] | None, tuple[str, ...]]

_LAYERS_BUILT = 256


def config_or_guess(found: _Found, catalog: Catalog) -> _Found:
    """``found``, or GPT-2's configuration read off the shapes where no file says any."""
    if found[0] is not None or (guessed := _guess_gpt2(catalog)) is None:
        return found
    return guessed, ("no config.json: GPT-2's configuration was read off the shapes",)


def config_to_build(
    found: _Found, catalog: Catalog, *, path: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration of a checkpoint from which a model is to be built, and notices about it.

    Args:
        found: as ``Source.config()`` gives it.
        catalog: the checkpoint's tensors.
        path: the checkpoint's, for messages.

    Raises:
        CheckpointError: there is none, or there is no model of its type here.
    """
    config, notices = config_or_guess(found, catalog)
    if config is None:
        why = "; ".join(notices) or "no config.json beside the checkpoint"
        raise CheckpointError(
            f"{why}, so the model cannot be built: put {'one' if notices else 'it'} "
            "there, or build the module yourself and use streamload.load_into",
            path=path,
        )
    model_type = config.get("model_type")
    known = known_model_types(with_model=True)
    if model_type not in known:
        raise CheckpointError(
            f"config.json says model_type {model_type!r}; streamload's own models are "
            f"{', '.join(known)}. With the extra transformers, streamload.load_transformers "
            "builds its class; or build the module yourself and use streamload.load_into",
            path=path,
        )
    return config, notices


def refuse_too_many_layers(
    config: Mapping[str, Any], catalog: Catalog, *, path: str, chosen: frozenset[int] | None
) -> None:
    """Refuse a layer count that the checkpoint cannot have, before a model of it is built.

    Args:
        config: as in ``config.json``.
        catalog: the checkpoint's tensors; every block has at least one of its own.
        path: the checkpoint's, for messages.
        chosen: just these layers are loaded, and perhaps just their files are open.

    Raises:
        PlanError: ``config`` has more layers than there are tensors.
    """
    field = layer_count_field(config.get("model_type"))
    layers, count = config.get(field), len(catalog)
    # Up to some hundred, the report of what is missing says more; it is made in no time.
    count = max(count, LAYERS_ALWAYS_ALLOWED if chosen is not None else _LAYERS_BUILT)
    if isinstance(layers, (int, float)) and layers > count:
        raise PlanError(
            f"{printable(path)}: config.json: {field!r} is {short(layers)}, but the "
            f"checkpoint has only {len(catalog)} tensors"
        )


def _guess_gpt2(catalog: Catalog) -> dict[str, Any] | None:
    """GPT-2's sizes are in its shapes; heads are 64 wide in all published sizes."""
    binding = bind_table(gpt2_map({}), catalog.tensors)
    shapes = {a.targets[0]: catalog[a.sources[0]].shape for a in binding.assignments}
    layers = {a.layer for a in binding.assignments if a.layer is not None}
    embedding, positions = shapes.get("tok_embed.weight"), shapes.get("pos_embed.weight")
    if embedding is None or positions is None or len(embedding) != 2 or len(positions) != 2:
        return None
    if layers != set(range(len(layers))) or not layers or embedding[1] % 64:
        return None
    return {
        "model_type": "gpt2",
        "vocab_size": embedding[0],
        "n_positions": positions[0],
        "n_embd": embedding[1],
        "n_layer": len(layers),
        "n_head": embedding[1] // 64,
    }
