"""GGUF files as llama.cpp's converter makes them of a published checkpoint.

Names, block layouts and the writing are that package's; the re-layouts are written out here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MADE_BY_LIBRARY = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
# The library cannot make them: their blocks are drawn at random.
DRAWN = ("IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# Where a block of these types has its float16 scales.
_SCALES_AT = {
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def raw_blocks(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random legal blocks of a type with small finite scales, as bytes [rows, bytes]."""
    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    random = np.random.default_rng(seed)
    count = int(np.prod(shape)) // elements
    blocks = random.integers(0, 256, (count, nbytes), dtype=np.uint8)
    for at in _SCALES_AT[name]:
        scales = (random.random(count) * 0.004).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks.reshape(*shape[:-1], shape[-1] // elements * nbytes)


def encoded(values: torch.Tensor, kind: str, seed: int = 0) -> np.ndarray:
    """A tensor's bytes in a type: of the values where the library can, else random blocks."""
    if kind == "BF16":
        return values.bfloat16().view(torch.int16).numpy().view(np.uint8)
    if kind in PLAIN:
        return values.to(PLAIN[kind]).numpy()
    if kind in DRAWN:
        return raw_blocks(kind, tuple(values.shape), seed)
    return gguf.quants.quantize(values.float().numpy(), GGMLQuantizationType[kind])


def decoded(data: np.ndarray, kind: str) -> torch.Tensor:
    """What the library makes of such bytes, in float32."""
    found = gguf.quants.dequantize(data, GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(found, dtype=np.float32))


def permuted(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of halves to rows of pairs, as the converter does for LLaMA's q and k."""
    rows = values.shape[0]
    apart = values.reshape(heads, 2, rows // heads // 2, *values.shape[1:])
    return apart.swapaxes(1, 2).reshape(values.shape)


def unpermuted(values: torch.Tensor, heads: int) -> torch.Tensor:
    rows = values.shape[0]
    apart = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return apart.swapaxes(1, 2).reshape(values.shape)


def _heads_of(name: str, config: Mapping[str, Any]) -> int:
    """Of q and k of the families that are permuted; 0 elsewhere."""
    if config["model_type"] in ("llama", "mistral"):
        if ".q_proj." in name:
            return int(config["num_attention_heads"])
        if ".k_proj." in name:
            return int(config.get("num_key_value_heads") or config["num_attention_heads"])
    return 0


def _is_conv1d(name: str, config: Mapping[str, Any]) -> bool:
    ends = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return config["model_type"] == "gpt2" and name.endswith(ends)


def write_gguf(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    kind: str | Callable[[str], str] = "F32",
    *,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    shard_tensors: int = 0,
) -> dict[str, torch.Tensor]:
    """Write published tensors as the converter would; matrices are of type ``kind``.

    Returns:
        The values that the file then has, in published names and layouts: float32, or as stored
        for plain types.
    """
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(
        os.fspath(path),
        "llama" if architecture == "mistral" else architecture,
        split_max_tensors=shard_tensors,
    )
    layers = int(config.get("num_hidden_layers", config.get("n_layer", 0)))
    add_config(writer, config)
    if extra is not None:
        extra(writer)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], layers)
    expected: dict[str, torch.Tensor] = {}
    for seed, (name, values) in enumerate(tensors.items()):
        heads, turned = _heads_of(name, config), _is_conv1d(name, config)
        stored = permuted(values, heads) if heads else values.t().contiguous() if turned else values
        own = kind if isinstance(kind, str) else kind(name)
        own = own if values.ndim > 1 else "F32"
        data = encoded(stored, own, seed)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        raw_type = None if own in ("F32", "F16") else GGMLQuantizationType[own]
        writer.add_tensor(target, data, raw_dtype=raw_type)
        found = decoded(data, own) if own not in PLAIN else stored.to(PLAIN[own])
        found = unpermuted(found, heads) if heads else found.t() if turned else found
        expected[name] = found.contiguous()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def add_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The keys that the converter writes for a configuration."""
    if config["model_type"] == "gpt2":
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config.get("layer_norm_epsilon", 1e-5))
        return
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name("mistral" if config["model_type"] == "mistral" else "a model")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] in ("llama", "mistral"):
        writer.add_rope_dimension_count(size)
