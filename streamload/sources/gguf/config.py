"""A GGUF file's metadata as the fields of a ``config.json``.

Source of the keys and defaults: the format's specification (docs/gguf.md of ggml) and llama.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from streamload.core.errors import CheckpointError
from streamload.core.specs import Shape
from streamload.sources.gguf.metadata import Metadata
from streamload.sources.gguf.rotary_factors import llama3_scaling

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
# Further tokens with which llama.cpp ends a text.
_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


def config_of(
    metadata: Metadata, shapes: Mapping[str, Shape], rotary_factors: bytes | None
) -> dict[str, Any] | None:
    """The configuration; None for an architecture that is none of ours.

    Args:
        metadata: the file's.
        shapes: of its tensors, by GGUF's names.
        rotary_factors: the float32 bytes of ``rope_freqs.weight``, if there is one.

    Raises:
        CheckpointError: a key is absent or holds what the model cannot have.
    """
    kind = metadata.architecture
    if kind not in _CLASSES:
        return None
    if metadata.whole(f"{kind}.expert_count"):
        raise metadata.fault(f"{kind}.expert_count", "0: there is no model of experts here")
    config = _gpt2(metadata) if kind == "gpt2" else _llama(metadata, kind, shapes)
    if rotary_factors is not None and kind != "gpt2":
        config["rope_scaling"] = _scaled(metadata, config, rotary_factors)
    return {
        "model_type": kind,
        "architectures": [_CLASSES[kind]],
        **config,
        "vocab_size": _vocabulary(metadata, kind, shapes),
        "tie_word_embeddings": _OUTPUT not in shapes,
        **token_ids(metadata),
    }


def token_ids(metadata: Metadata) -> dict[str, Any]:
    """Begin, end and padding; several ends as a list."""
    found: dict[str, Any] = {name: metadata.whole(key) for name, key in _TOKENS.items()}
    ends = [found["eos_token_id"], *(metadata.whole(key) for key in _ENDS)]
    several = list(dict.fromkeys(end for end in ends if end is not None))
    if found["eos_token_id"] is not None and len(several) > 1:
        found["eos_token_id"] = several
    return found


def _llama(metadata: Metadata, kind: str, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    heads = metadata.needed(f"{kind}.attention.head_count")
    width = metadata.needed(f"{kind}.embedding_length")
    size = metadata.whole(f"{kind}.attention.key_length", least=1) or width // heads
    for key in (f"{kind}.attention.value_length", f"{kind}.rope.dimension_count"):
        if metadata.has(key) and metadata.whole(key) != size:
            raise metadata.fault(key, f"{size}, the size of a head")
    eps = metadata.number(f"{kind}.attention.layer_norm_rms_epsilon")
    theta = metadata.number(f"{kind}.rope.freq_base")
    config: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": metadata.needed(f"{kind}.feed_forward_length"),
        "num_hidden_layers": metadata.needed(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole(f"{kind}.attention.head_count_kv", least=1) or heads,
        "head_dim": size,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.needed(f"{kind}.context_length"),
        "rms_norm_eps": 1e-5 if eps is None else _nearest(eps),
        "rope_theta": 10000.0 if theta is None else _nearest(theta),
        "rope_scaling": _scaling(metadata, kind),
    }
    if kind == "qwen2" and size == width // heads:  # no field of its configuration
        del config["head_dim"]
    if kind in ("llama", "qwen3"):
        config["attention_bias"] = _has(shapes, "attn_output.bias", "attn_q.bias")
    if kind == "llama":
        config["mlp_bias"] = _has(shapes, "ffn_up.bias", "ffn_down.bias")
    if kind == "mistral":
        config["sliding_window"] = metadata.whole(f"{kind}.attention.sliding_window") or None
    return config


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    width = metadata.needed("gpt2.embedding_length")
    inner = metadata.whole("gpt2.feed_forward_length", least=1)
    eps = metadata.number("gpt2.attention.layer_norm_epsilon")
    return {
        "n_embd": width,
        "n_layer": metadata.needed("gpt2.block_count"),
        "n_head": metadata.needed("gpt2.attention.head_count"),
        "n_positions": metadata.needed("gpt2.context_length"),
        "n_inner": None if inner == 4 * width else inner,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5 if eps is None else _nearest(eps),
    }


def _scaling(metadata: Metadata, kind: str) -> dict[str, Any] | None:
    """``rope_scaling`` by the keys; older files have but a factor."""
    start = f"{kind}.rope.scaling."
    name = metadata.text(f"{start}type")
    factor = metadata.number(f"{start}factor") or metadata.number(f"{kind}.rope.scale_linear")
    if name is None:
        name = "none" if factor in (None, 1.0) else "linear"
    if name == "none":
        return None
    if name not in ("linear", "yarn"):
        raise metadata.fault(f"{start}type", "none, linear or yarn")
    if factor is None:
        raise CheckpointError(f"there is no {start + 'factor'!r}", path=metadata.path)
    found: dict[str, Any] = {"rope_type": name, "factor": factor}
    if name == "yarn":
        original = metadata.whole(f"{start}original_context_length", least=1)
        if original is not None:
            found["original_max_position_embeddings"] = original
        for key, field in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := metadata.number(start + key)) is not None:
                found[field] = value
    return found


def _scaled(metadata: Metadata, config: Mapping[str, Any], factors: bytes) -> dict[str, Any] | None:
    """LLaMA 3's scaling, which files hold as one factor for each pair."""
    if config["rope_scaling"] is not None:
        raise CheckpointError(
            "scales the rotary frequencies by its keys and by rope_freqs.weight", path=metadata.path
        )
    values = struct.unpack(f"<{len(factors) // 4}f", factors)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    expected = size // 2
    if len(values) != expected:
        raise CheckpointError(
            f"has {len(values)} factors, expected {expected}, one for each pair of a head",
            path=metadata.path,
            tensor="rope_freqs.weight",
        )
    try:
        return llama3_scaling(values, config["rope_theta"])
    except ValueError as error:
        raise CheckpointError(str(error), path=metadata.path, tensor="rope_freqs.weight") from error


def _vocabulary(metadata: Metadata, kind: str, shapes: Mapping[str, Shape]) -> int:
    """The embedding's rows: what a model of this file must have."""
    embedding = shapes.get(_EMBEDDING)
    if embedding is not None and len(embedding) == 2:
        return embedding[0]
    tokens = metadata.texts("tokenizer.ggml.tokens")
    return metadata.whole(f"{kind}.vocab_size", least=1) or len(tokens or ())


def _has(shapes: Collection[str], *parts: str) -> bool:
    return any(f"blk.0.{part}" in shapes for part in parts)


def _nearest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    with suppress(OverflowError):  # beyond float32: written as a float64
        for digits in range(1, 10):
            short = float(f"{value:.{digits}g}")
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
    return value
