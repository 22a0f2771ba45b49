"""GPT-2 in plain torch, with the names of the course's lesson."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamload.models.decoder import Decoder
from streamload.models.fields import flag, number, optional_id, positive_int, text
from streamload.models.layers import (
    KVCache,
    LayerNorm,
    Span,
    activation,
    attend,
    embedding,
)

__all__ = ["GPT", "GPTConfig"]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices of a GPT-2, under the names and defaults of its ``config.json``."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_layer: int = 12
    n_embd: int = 768
    n_head: int = 12
    n_inner: int = 3072
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | tuple[int, ...] | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> GPTConfig:
        """Read a GPT-2 ``config.json``; ``n_inner`` null is four times the width.

        ``reorder_and_upcast_attn`` changes no formula, only where half precision is left, which
        the attention here does anyway; it is kept for writing the configuration back.

        Raises:
            ValueError: a field of the wrong kind, or a choice that is not supported.
        """
        width = positive_int(config, "n_embd", 768)
        heads = positive_int(config, "n_head", 12)
        if width % heads:
            raise ValueError(f"n_embd {width} is not a multiple of n_head {heads}")
        if flag(config, "add_cross_attention", False):
            raise ValueError("add_cross_attention is not supported")
        name = text(config, "activation_function", "gelu_new")
        activation(name)
        return cls(
            vocab_size=positive_int(config, "vocab_size", 50257),
            n_positions=positive_int(config, "n_positions", 1024),
            n_layer=positive_int(config, "n_layer", 12),
            n_embd=width,
            n_head=heads,
            n_inner=positive_int(config, "n_inner", 4 * width),
            layer_norm_epsilon=number(config, "layer_norm_epsilon", 1e-5),
            activation_function=name,
            scale_attn_weights=flag(config, "scale_attn_weights", True),
            scale_attn_by_inverse_layer_idx=flag(config, "scale_attn_by_inverse_layer_idx", False),
            reorder_and_upcast_attn=flag(config, "reorder_and_upcast_attn", False),
            tie_word_embeddings=flag(config, "tie_word_embeddings", True),
            bos_token_id=optional_id(config, "bos_token_id"),
            eos_token_id=optional_id(config, "eos_token_id"),
        )

    def to_dict(self) -> dict[str, Any]:
        """A ``config.json`` that transformers' ``AutoConfig`` reads as the same model."""
        # Absent token ids are written as null: left out, a reader would take GPT-2's own.
        inner = None if self.n_inner == 4 * self.n_embd else self.n_inner
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            **vars(self),
            "n_inner": inner,
        }


class Attention(nn.Module):
    """Self-attention with fused ``qkv`` [3d, d], rows q | k | v."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.n_head
        self.head_size = config.n_embd // config.n_head
        self.scale = self.head_size**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.out_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, span: Span, cache: KVCache | None) -> Tensor:
        """[batch, n, d] to [batch, n, d]."""
        batch, count, _ = x.shape
        fused = self.qkv(x).view(batch, count, 3, self.heads, self.head_size)
        q, k, v = fused.permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        mixed: Tensor = self.out_proj(attend(q, k, v, span=span, scale=self.scale))
        return mixed


class MLP(nn.Module):
    """``fc1``, activation, ``fc2``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.act = activation(config.activation_function)
        self.fc1 = nn.Linear(config.n_embd, config.n_inner)
        self.fc2 = nn.Linear(config.n_inner, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] to [..., d]."""
        mixed: Tensor = self.fc2(self.act(self.fc1(x)))
        return mixed


class GPTBlock(nn.Module):
    """Pre-norm block: attention, then the feed-forward part, each added to its input."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, span: Span, cache: KVCache | None) -> Tensor:
        """[batch, n, d] to [batch, n, d]."""
        x = x + self.attn(self.ln1(x), span, cache)
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class GPT(Decoder):
    """GPT-2 with a language-model head; ``lm_head.weight`` is ``tok_embed.weight`` when tied."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embed = embedding(config.vocab_size, config.n_embd)
        self.pos_embed = embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(GPTBlock(config, layer) for layer in range(config.n_layer))
        self.final_ln = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.tok_embed.weight

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GPT:
        """The model that a ``config.json`` describes, with random weights.

        Raises:
            ValueError: see ``GPTConfig.from_dict``.
        """
        return cls(GPTConfig.from_dict(config))

    @property
    def context_length(self) -> int:
        """The positions that ``pos_embed`` has rows for."""
        return self.config.n_positions

    def _embed(self, ids: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + ids.shape[1], device=self.pos_embed.weight.device)
        tokens: Tensor = self.tok_embed(ids)
        places: Tensor = self.pos_embed(positions)
        return tokens + places.to(tokens.device)
