"""Tiny random models of every family, saved by transformers once per session."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import nn
from transformers import (
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.models.peers import build_pair

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
FAMILIES = {
    "gpt2": lambda: GPT2Config(
        vocab_size=97,
        n_positions=64,
        n_embd=32,
        n_layer=3,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "llama3": lambda: LlamaConfig(**GROUPED, rope_parameters=dict(LLAMA3)),
    "yarn": lambda: LlamaConfig(**GROUPED, rope_parameters=dict(YARN)),
    "biases-tied": lambda: LlamaConfig(
        **GROUPED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=4, head_dim=12),
    "qwen2": lambda: Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=24),
    "gpt_neox": lambda: GPTNeoXConfig(**EVEN),
    "gpt_neox-sequential": lambda: GPTNeoXConfig(**EVEN, use_parallel_residual=False),
}

OTHERS = {"plain-llama": lambda: LlamaConfig(**GROUPED, rope_theta=500.0)}


@dataclass(frozen=True)
class Saved:
    """A checkpoint, the transformers model it was saved from, and ours filled by hand."""

    folder: Path
    peer: nn.Module
    expected: nn.Module


@cache
def saved(name: str, root: Path) -> Saved:
    peer, expected = build_pair({**FAMILIES, **OTHERS}[name]())
    folder = root / name
    peer.save_pretrained(folder)
    return Saved(folder, peer, expected)
