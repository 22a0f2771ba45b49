"""The parameters of every architecture's tests: one row each, as in ``mapping.tables.registry``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import (
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
EVEN = SIZES | {"vocab_size": 96}  # can be cut into partitions
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        published: name of a test → configuration at published sizes.
        checkpoints: name of a test → transformers' configuration of a tiny model.
        names: of transformers' modules, found by hand → ours; ``{}`` is a block's number, and
            several that are joined by ``+`` are one of ours.
    """

    published: Mapping[str, Mapping[str, Any]]
    checkpoints: Mapping[str, Callable[[], Any]]
    names: Mapping[str, str]


_LLAMA_NAMES = {
    "model.embed_tokens": "tok_embed",
    "model.norm": "final_ln",
    "model.layers.{}.input_layernorm": "blocks.{}.ln1",
    "model.layers.{}.post_attention_layernorm": "blocks.{}.ln2",
    **{f"model.layers.{{}}.self_attn.{part}_proj": f"blocks.{{}}.attn.{part}" for part in "qkv"},
    "model.layers.{}.self_attn.o_proj": "blocks.{}.attn.out_proj",
    "model.layers.{}.mlp.gate_proj": "blocks.{}.mlp.gate",
    "model.layers.{}.mlp.up_proj": "blocks.{}.mlp.up",
    "model.layers.{}.mlp.down_proj": "blocks.{}.mlp.down",
}
ARCHITECTURES = {
    "gpt2": Case(
        {"gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}},
        {
            "gpt2": lambda: GPT2Config(
                vocab_size=97,
                n_positions=64,
                n_embd=32,
                n_layer=3,
                n_head=4,
                bos_token_id=None,
                eos_token_id=None,
            )
        },
        {
            "transformer.wte": "tok_embed",
            "transformer.wpe": "pos_embed",
            "transformer.ln_f": "final_ln",
            "transformer.h.{}.ln_1": "blocks.{}.ln1",
            "transformer.h.{}.ln_2": "blocks.{}.ln2",
            "transformer.h.{}.attn.c_attn": "blocks.{}.attn.qkv",
            "transformer.h.{}.attn.c_proj": "blocks.{}.attn.out_proj",
            "transformer.h.{}.mlp.c_fc": "blocks.{}.mlp.fc1",
            "transformer.h.{}.mlp.c_proj": "blocks.{}.mlp.fc2",
        },
    ),
    "llama": Case(
        {
            "llama": LLAMA_1B,
            "llama-biases": LLAMA_1B | {"attention_bias": True, "mlp_bias": True},
        },
        {
            "llama3": lambda: LlamaConfig(**GROUPED, rope_parameters=dict(LLAMA3)),
            "yarn": lambda: LlamaConfig(**GROUPED, rope_parameters=dict(YARN)),
            "biases-tied": lambda: LlamaConfig(
                **GROUPED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
            ),
        },
        _LLAMA_NAMES,
    ),
    "mistral": Case(
        {"mistral": LLAMA_1B | {"head_dim": 128, "tie_word_embeddings": False}},
        {"mistral": lambda: MistralConfig(**GROUPED, sliding_window=4, head_dim=12)},
        _LLAMA_NAMES,
    ),
    "qwen2": Case(
        {"qwen2": LLAMA_1B},
        {"qwen2": lambda: Qwen2Config(**GROUPED, tie_word_embeddings=True)},
        _LLAMA_NAMES,
    ),
    "qwen3": Case(
        {
            "qwen3": LLAMA_1B | {"head_dim": 128, "attention_bias": True},
            "qwen3-head-of-128-by-default": LLAMA_1B | {"hidden_size": 1024},
        },
        {"qwen3": lambda: Qwen3Config(**GROUPED, head_dim=24)},
        _LLAMA_NAMES
        | {
            "model.layers.{}.self_attn.q_norm": "blocks.{}.attn.q_norm",
            "model.layers.{}.self_attn.k_norm": "blocks.{}.attn.k_norm",
        },
    ),
    "gpt_neox": Case(
        {
            "gpt_neox": {"num_hidden_layers": 44},
            "gpt_neox-bare": {"attention_bias": False, "num_hidden_layers": 6},
        },
        {
            "gpt_neox": lambda: GPTNeoXConfig(**EVEN),
            "gpt_neox-sequential": lambda: GPTNeoXConfig(**EVEN, use_parallel_residual=False),
        },
        {
            "gpt_neox.embed_in": "tok_embed",
            "gpt_neox.final_layer_norm": "final_ln",
            "gpt_neox.layers.{}.input_layernorm": "blocks.{}.ln1",
            "gpt_neox.layers.{}.post_attention_layernorm": "blocks.{}.ln2",
            "gpt_neox.layers.{}.attention.query_key_value": "blocks.{}.attn.qkv",
            "gpt_neox.layers.{}.attention.dense": "blocks.{}.attn.out_proj",
            "gpt_neox.layers.{}.mlp.dense_h_to_4h": "blocks.{}.mlp.fc1",
            "gpt_neox.layers.{}.mlp.dense_4h_to_h": "blocks.{}.mlp.fc2",
        },
    ),
    "olmo2": Case(
        {
            "olmo2": LLAMA_1B | {"tie_word_embeddings": False},
            "olmo2-biases": LLAMA_1B | {"attention_bias": True},
        },
        {"olmo2": lambda: Olmo2Config(**GROUPED, pad_token_id=None)},
        {name: ours for name, ours in _LLAMA_NAMES.items() if "input_layernorm" not in name}
        | {
            "model.layers.{}.self_attn.q_norm": "blocks.{}.attn.q_norm",
            "model.layers.{}.self_attn.k_norm": "blocks.{}.attn.k_norm",
            "model.layers.{}.post_attention_layernorm": "blocks.{}.ln1",
            "model.layers.{}.post_feedforward_layernorm": "blocks.{}.ln2",
        },
    ),
}
