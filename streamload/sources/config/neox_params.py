"""The configuration of a raw GPT-NeoX checkpoint, in the form of transformers' ``gpt_neox``.

Taken from ``config.json`` beside the files, else from ``configs/*.yml`` as GPT-NeoX trained with,
else from the shapes and the values published for GPT-NeoX-20B.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from streamload.core.errors import CheckpointError, naming, refuse
from streamload.core.specs import TensorSpec
from streamload.core.wording import printable
from streamload.sources.config.yml import read_settings
from streamload.sources.small_files import read_object

Config: TypeAlias = dict[str, Any]

_HEAD_SIZE_20B = 96
# Published for GPT-NeoX-20B; the ones that shapes do not tell.
_PUBLISHED_20B: Config = {
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "use_parallel_residual": True,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
}
# What GPT-NeoX itself takes where its yml files say nothing (megatron/neox_arguments).
_NEOX_DEFAULTS: Config = {**_PUBLISHED_20B, "rotary_pct": 1.0, "use_parallel_residual": False}
_YML_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "rotary_pct": "rotary_pct",
    "rotary_emb_base": "rotary_emb_base",
    "gpt_j_residual": "use_parallel_residual",
    "layernorm_epsilon": "layer_norm_eps",
    "activation": "hidden_act",
    "max_position_embeddings": "max_position_embeddings",
}
# Forms of the model that these files can have and that are not the published one.
_SUPPORTED = {
    "norm": ("layernorm",),
    "pos_emb": ("rotary",),
    "activation": ("gelu",),
    "mlp_type": ("regular",),
    "no_weight_tying": (True,),
}

_RELEVANT = frozenset(_YML_NAMES) | frozenset(_SUPPORTED)


def neox_config(
    folder: str, stored: Mapping[str, TensorSpec], *, blocks: int, ranks: int
) -> tuple[Config, tuple[str, ...]]:
    """The configuration, and notices that say where it came from.

    Args:
        folder: looked in first, then the folder of the files and, if that is a training step's,
            the one above it.
        stored: the partitions' tensors.
        blocks: transformer blocks of the whole checkpoint.
        ranks: partitions of each layer.

    Raises:
        CheckpointError: a configuration file is damaged, contradicts the files, or describes a
            model of another form; or the number of heads cannot be determined.
        MissingExtraError: there are yml files and PyYAML is not installed.
    """
    places = _places(folder, next(iter(stored.values())).file)
    for place in places:
        path = os.path.join(place, "config.json")
        if os.path.lexists(path):
            return _from_json(path), (f"configuration from {printable(path)}",)
    shapes = _from_shapes(stored, blocks, ranks)
    for place in places:
        found = _from_yml(place, shapes)
        if found is not None:
            return found
    width = shapes["hidden_size"]
    if width % _HEAD_SIZE_20B:
        raise CheckpointError(
            f"no config.json and no configs/*.yml, and the shapes do not tell the number of "
            f"attention heads of width {width}: put a config.json beside the files",
            path=folder,
        )
    heads = width // _HEAD_SIZE_20B
    notice = (
        f"no config.json and no configs/*.yml in {printable(folder)}: sizes from the shapes, "
        f"{heads} heads of {_HEAD_SIZE_20B}, rotary share, residual form and the rest as "
        f"published for GPT-NeoX-20B"
    )
    return {**shapes, **_PUBLISHED_20B, "num_attention_heads": heads}, (notice,)


def _places(folder: str, partition: str) -> list[str]:
    step = os.path.dirname(partition)
    above, name = os.path.split(os.path.abspath(step))
    places = [folder, step, *([above] if name.startswith("global_step") else [])]
    return list(dict.fromkeys(places))


def _from_json(path: str) -> Config:
    config = read_object(path)
    config.setdefault("model_type", "gpt_neox")
    if config["model_type"] != "gpt_neox":
        raise CheckpointError(
            f"has model_type {config['model_type']!r}, but partitions of gpt_neox are beside it",
            path=path,
        )
    return config


def _from_shapes(stored: Mapping[str, TensorSpec], blocks: int, ranks: int) -> Config:
    """What the stored tensors tell by themselves."""
    shapes = {name: spec.shape for name, spec in stored.items()}
    config: Config = {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "num_hidden_layers": blocks,
        "hidden_size": shapes[f"layer_{blocks + 3}.model_0.norm.weight"][0],
        "vocab_size": shapes[f"layer_{blocks + 4}.model_0.final_linear.weight"][0] * ranks,
        "tie_word_embeddings": False,
    }
    for name, shape in shapes.items():
        if name.endswith(".model_0.mlp.dense_h_to_4h.weight") and shape:
            config["intermediate_size"] = shape[0] * ranks
    return config


def _from_yml(place: str, shapes: Config) -> tuple[Config, tuple[str, ...]] | None:
    folder = os.path.join(place, "configs")
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return None
    paths = [os.path.join(folder, n) for n in names if n.endswith((".yml", ".yaml"))]
    values = _merge(paths)
    if not {"num_layers", "hidden_size", "num_attention_heads"} & set(values):
        return None  # files of other settings: they do not describe a model
    where = ", ".join(map(printable, paths))
    stated = {theirs: values[ours] for ours, theirs in _YML_NAMES.items() if ours in values}
    with naming(folder):
        _check_form(values)
        for key in ("num_hidden_layers", "hidden_size", "intermediate_size"):
            if key in stated and key in shapes and stated[key] != shapes[key]:
                raise CheckpointError(f"says {key} {stated[key]!r}, the files hold {shapes[key]!r}")
        if type(stated.get("num_attention_heads")) is not int:
            raise CheckpointError("does not say num-attention-heads")
    assumed = [key for key in _NEOX_DEFAULTS if key not in stated]
    notices = [f"configuration from {where}"]
    if assumed:
        shown = ", ".join(f"{key}={_NEOX_DEFAULTS[key]}" for key in assumed)
        notices.append(f"not in {printable(folder)}, taken as GPT-NeoX's default: {shown}")
    return {**_NEOX_DEFAULTS, **shapes, **stated}, tuple(notices)


def _merge(paths: list[str]) -> dict[str, object]:
    """What the files say, with underscores; two files may not say different things."""
    found: dict[str, tuple[object, str]] = {}
    for path in paths:
        for name, value in read_settings(path, _RELEVANT).items():
            first, origin = found.setdefault(name, (value, path))
            if value != first:
                raise CheckpointError(
                    f"says {name} {value!r}, but {printable(origin)} says {first!r}", path=path
                )
    return {name: value for name, (value, _) in found.items()}


def _check_form(values: Mapping[str, object]) -> None:
    refuse(
        f"{key} is {values[key]!r}, supported: {' or '.join(map(repr, known))}"
        for key, known in _SUPPORTED.items()
        if key in values and values[key] not in known
    )
