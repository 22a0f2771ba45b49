"""The checkpoints ``synth`` can make: one table entry each, configs as published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from streamload.synthesis.recipes import Preset, Recipe


def _gpt2(layers: int, width: int, heads: int, *, positions: int = 1024, vocab: int = 50257) -> Any:
    config = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": vocab - 1,
        "embd_pdrop": 0.1,
        "eos_token_id": vocab - 1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": positions,
        "n_embd": width,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": positions,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": vocab,
    }
    return Preset(config, "float32", buffers=_gpt2_mask)


def _gpt2_mask(config: Mapping[str, Any]) -> Iterator[Recipe]:
    positions = config["n_positions"]
    yield Recipe("h.{layer}.attn.bias", (1, 1, positions, positions), "causal_mask")


def _llama(
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    inner: int = 160,
    *,
    shard_bytes: int | None = None,
    **changes: Any,
) -> Preset:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 320,
    }
    kind = changes.get("model_type", "llama")
    if kind != "llama":
        config["architectures"] = [f"{kind.capitalize()}ForCausalLM"]
        del config["mlp_bias"], config["attention_bias"]
    config |= changes
    # The published small Qwen3 files hold the tied head a second time.
    return Preset(config, "bfloat16", shard_bytes, repeats_head=kind == "qwen3")


def _neox(layers: int, width: int, heads: int, *, positions: int = 2048, vocab: int = 50304) -> Any:
    config = {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": 4 * width,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": positions,
        "model_type": "gpt_neox",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": vocab,
    }
    order = ("ln1", "ln2", "attn", "mlp")
    return Preset(config, "float16", block_order=order, buffers=_neox_buffers)


def _neox_buffers(config: Mapping[str, Any]) -> Iterator[Recipe]:
    """The mask, its fill value, and the rotary table."""
    positions = config["max_position_embeddings"]
    head_size = config["hidden_size"] // config["num_attention_heads"]
    start, rotary = "gpt_neox.layers.{layer}.attention.", int(head_size * config["rotary_pct"])
    yield Recipe(f"{start}bias", (1, 1, positions, positions), "causal_mask", dtype="bool")
    yield Recipe(f"{start}masked_bias", (), "constant", -1e9)
    base = float(config["rotary_emb_base"])
    yield Recipe(f"{start}rotary_emb.inv_freq", (rotary // 2,), "inv_freq", base)


_LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_QWEN: dict[str, Any] = {
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_TINY: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 320}

PRESETS: dict[str, Preset] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-stub": _gpt2(12, 192, 6, positions=256, vocab=1024),
    "gpt2-tiny": _gpt2(2, 64, 4, positions=64, vocab=320),
    "llama-tiny": _llama(),
    "llama-3.2-1b": _llama(
        16,
        2048,
        32,
        8,
        8192,
        bos_token_id=128000,
        eos_token_id=128001,
        head_dim=64,
        max_position_embeddings=131072,
        rope_scaling=_LLAMA3_ROPE,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        vocab_size=128256,
    ),
    "mistral-tiny": _llama(model_type="mistral", head_dim=32, sliding_window=64),
    "mistral-7b": _llama(
        32,
        4096,
        32,
        8,
        14336,
        model_type="mistral",
        max_position_embeddings=32768,
        sliding_window=4096,
        vocab_size=32000,
        shard_bytes=10_000_000_000,
    ),
    "qwen2-tiny": _llama(model_type="qwen2", **_QWEN | _TINY),
    "qwen2.5-0.5b": _llama(
        24,
        896,
        14,
        2,
        4864,
        model_type="qwen2",
        max_position_embeddings=32768,
        max_window_layers=24,
        sliding_window=32768,
        **_QWEN,
    ),
    "qwen3-tiny": _llama(model_type="qwen3", attention_bias=False, head_dim=32, **_QWEN | _TINY),
    "qwen3-0.6b": _llama(
        28,
        1024,
        16,
        8,
        3072,
        model_type="qwen3",
        attention_bias=False,
        head_dim=128,
        max_position_embeddings=40960,
        max_window_layers=28,
        sliding_window=None,
        **_QWEN | {"eos_token_id": 151645},
    ),
    "olmo2-tiny": replace(
        _llama(model_type="olmo2", attention_bias=False),
        block_order=("attn", "ln1", "mlp", "ln2"),
    ),
    "neox-tiny": _neox(2, 64, 4, positions=64, vocab=320),
    "pythia-1b": _neox(16, 2048, 8),
}
