"""``config.json`` beside a checkpoint, and what can be said without one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from streamload.core.errors import CheckpointError, CheckpointNotFoundError, PlanError, printable
from streamload.mapping.fields import LAYERS_ALWAYS_ALLOWED, short
from streamload.mapping.registry import known_model_types, layer_count_field
from streamload.sources.base import Source
from streamload.sources.detect import folder_of
from streamload.sources.files import OpenFile
from streamload.sources.safetensors.header import loads_strictly

__all__ = ["config_of", "find_config", "read_config", "refuse_too_many_layers"]

_MAX_CONFIG_BYTES = 16 << 20
_LAYERS_BUILT = 256


def read_config(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The ``config.json`` in the checkpoint's folder, or None if there is none.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    return _read_object(os.path.join(folder_of(path), "config.json"))


def _read_object(config_path: str) -> dict[str, Any] | None:
    try:
        file = OpenFile(config_path)
    except CheckpointNotFoundError:
        return None
    try:
        text = file.read(0, min(file.size_bytes, _MAX_CONFIG_BYTES))
    finally:
        file.close()
    try:
        config = loads_strictly(text.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON: {error}", path=config_path) from error
    if not isinstance(config, dict):
        raise CheckpointError("is not a JSON object", path=config_path)
    return config


def config_of(source: Source) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """What is known of the model beside a checkpoint, and notices; None if nothing is.

    Raises:
        CheckpointError: there is a configuration, and it cannot be used.
    """
    from streamload.sources.neox.partitions import NeoXRawSource

    if not isinstance(source, NeoXRawSource):
        config = read_config(source.path)
        return (config, ()) if config is not None else _from_params(source)
    from streamload.sources.neox.neox_config import neox_config

    return neox_config(source.path, source)


def _from_params(source: Source) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Meta's ``params.json``; one that is not for these files is as if it was not there."""
    from streamload.mapping.tables.meta_config import config_from_params

    params_path = os.path.join(folder_of(source.path), "params.json")
    params = _read_object(params_path)
    if params is None or "n_layers" not in params:
        return None, ()
    try:
        return config_from_params(params, source.catalog)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(str(error), path=params_path) from error


def find_config(source: Source) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration of a checkpoint from which a model is to be built, and notices about it.

    Raises:
        CheckpointError: there is none, or its model type has no model here.
    """
    config, notices = config_of(source)
    if config is None:
        guessed = _guess_gpt2(source)
        if guessed is None:
            raise CheckpointError(
                "no config.json beside the checkpoint, so the model cannot be built: put it "
                "there, or build the module yourself and use streamload.load_into",
                path=source.path,
            )
        return guessed, ("no config.json: GPT-2's configuration was read off the shapes",)
    model_type = config.get("model_type")
    if model_type not in known_model_types(with_model=True):
        raise CheckpointError(
            f"config.json says model_type {model_type!r}; models here: "
            f"{', '.join(known_model_types(with_model=True))}. Build the module yourself and use "
            "streamload.load_into",
            path=source.path,
        )
    return config, notices


def refuse_too_many_layers(
    config: Mapping[str, Any], source: Source, chosen: frozenset[int] | None = None
) -> None:
    """Refuse a layer count that the checkpoint cannot have, before a model of it is built.

    Args:
        config: as in ``config.json``.
        source: the checkpoint; every block has at least one tensor of its own.
        chosen: just these layers are loaded, and perhaps just their files are open.

    Raises:
        PlanError: ``config`` has more layers than there are tensors.
    """
    field = layer_count_field(config.get("model_type"))
    layers, count = config.get(field), len(source.catalog)
    # Up to some hundred, the report of what is missing says more; it is made in no time.
    count = max(count, LAYERS_ALWAYS_ALLOWED if chosen is not None else _LAYERS_BUILT)
    if isinstance(layers, (int, float)) and layers > count:
        raise PlanError(
            f"{printable(source.path)}: config.json: {field!r} is {short(layers)}, but the "
            f"checkpoint has only {len(source.catalog)} tensors"
        )


def _guess_gpt2(source: Source) -> dict[str, Any] | None:
    """GPT-2's sizes are in its shapes; heads are 64 wide in all published sizes."""
    from streamload.mapping.binding import bind_table
    from streamload.mapping.tables.gpt2_names import gpt2_map

    binding = bind_table(gpt2_map({}), source.catalog.tensors)
    shapes = {a.targets[0]: source.catalog[a.sources[0]].shape for a in binding.assignments}
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
