"""GPT-2 in plain torch, with the names of the course's lesson."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamload.models.config_fields import ModelConfig, flag, number, positive_int, published
from streamload.models.decoder import Decoder
from streamload.models.layers import (
    Attention,
    FeedForward,
    LayerNorm,
    PreNormBlock,
    activation_name,
    embedding,
)


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """Sizes and choices of a GPT-2, under the names and defaults of its ``config.json``.

    ``reorder_and_upcast_attn`` changes no formula, only where half precision is left, which the
    attention here does anyway; it is kept for writing the configuration back.
    """

    vocab_size: int = published(positive_int, 50257)
    n_positions: int = published(positive_int, 1024)
    n_layer: int = published(positive_int, 12)
    n_embd: int = published(positive_int, 768)
    n_head: int = published(positive_int, 12)
    n_inner: int = 3072
    layer_norm_epsilon: float = published(number, 1e-5)
    activation_function: str = published(activation_name, "gelu_new")
    scale_attn_weights: bool = published(flag, True)
    scale_attn_by_inverse_layer_idx: bool = published(flag, False)
    reorder_and_upcast_attn: bool = published(flag, False)
    tie_word_embeddings: bool = published(flag, True)

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")

    @classmethod
    def _derived(cls, config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        if flag(config, "add_cross_attention", False):
            raise ValueError("add_cross_attention is not supported")
        return {"n_inner": positive_int(config, "n_inner", 4 * values["n_embd"])}

    def to_dict(self) -> dict[str, Any]:
        """A ``config.json`` that transformers' ``AutoConfig`` reads as the same model."""
        # Absent token ids are written as null: left out, a reader would take GPT-2's own.
        inner = None if self.n_inner == 4 * self.n_embd else self.n_inner
        own = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        return {**own, **vars(self), "n_inner": inner}


class GPTAttention(Attention):
    """Self-attention with fused ``qkv`` [3d, d], rows q | k | v."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__(layer, config.n_embd // config.n_head)
        if not config.scale_attn_weights:
            self.scale = 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.out_proj = nn.Linear(config.n_embd, config.n_embd)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        fused: Tensor = self.qkv(x).unflatten(-1, (3, -1, self.head_size))
        return fused.permute(2, 0, 3, 1, 4).unbind(0)


class GPT(Decoder):
    """GPT-2 with a language-model head."""

    config_class = GPTConfig
    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        width, eps = config.n_embd, config.layer_norm_epsilon
        super().__init__(config, width)
        self.pos_embed = embedding(config.n_positions, width)
        blocks = (
            PreNormBlock(
                LayerNorm(width, eps),
                GPTAttention(config, layer),
                LayerNorm(width, eps),
                FeedForward(width, config.n_inner, config.activation_function),
            )
            for layer in range(config.n_layer)
        )
        self._add_blocks(blocks, LayerNorm(width, eps))

    @property
    def context_length(self) -> int:
        """The positions that ``pos_embed`` has rows for."""
        return self.config.n_positions

    def _embed(self, ids: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + ids.shape[1], device=self.pos_embed.weight.device)
        tokens: Tensor = self.tok_embed(ids)
        places: Tensor = self.pos_embed(positions)
        return tokens + places.to(tokens.device)
