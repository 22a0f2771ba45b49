"""GPT-NeoX in plain torch: the 20B model and Pythia."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from streamload.models.config_fields import ModelConfig, flag, number, positive_int, published
from streamload.models.decoder import Decoder
from streamload.models.layers import (
    Attention,
    FeedForward,
    KVCache,
    LayerNorm,
    PreNormBlock,
    Span,
    activation_name,
)
from streamload.models.rotary import Rope, RotaryTables


@dataclass(frozen=True, kw_only=True)
class NeoXConfig(ModelConfig):
    """Sizes and choices of a GPT-NeoX, under the names and defaults of its ``config.json``.

    The rotary fields may be ``rotary_pct`` and ``rotary_emb_base``, or
    ``partial_rotary_factor`` and ``rope_theta`` inside ``rope_parameters``.
    """

    vocab_size: int = published(positive_int, 50432)
    hidden_size: int = published(positive_int, 6144)
    intermediate_size: int = published(positive_int, 24576)
    num_hidden_layers: int = published(positive_int, 44)
    num_attention_heads: int = published(positive_int, 64)
    max_position_embeddings: int = published(positive_int, 2048)
    layer_norm_eps: float = published(number, 1e-5)
    hidden_act: str = published(activation_name, "gelu")
    use_parallel_residual: bool = published(flag, True)
    attention_bias: bool = published(flag, True)
    rope: Rope = Rope(partial=0.25)  # noqa: RUF009 (frozen)

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def _derived(cls, config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        rope = Rope.from_dict(
            config,
            max_positions=values["max_position_embeddings"],
            theta_name="rotary_emb_base",
            partial_name="rotary_pct",
            partial_default=0.25,
        )
        return {"rope": rope}

    def to_dict(self) -> dict[str, Any]:
        """A ``config.json`` that transformers' ``AutoConfig`` reads as the same model."""
        values = {name: value for name, value in vars(self).items() if name != "rope"}
        rope = self.rope.to_dict()
        return {
            "model_type": "gpt_neox",
            "architectures": ["GPTNeoXForCausalLM"],
            **values,
            "rotary_pct": self.rope.partial,
            "rotary_emb_base": rope["rope_theta"],
            "rope_scaling": rope["rope_scaling"],
        }

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )
        rotated = self.rope.rotary_size(self.head_size)
        if rotated < 2 or rotated % 2 or rotated > self.head_size:
            raise ValueError(
                f"rotary_pct {self.rope.partial} rotates {rotated} of {self.head_size} features "
                "of a head: it must be an even number of them"
            )


class NeoXAttention(Attention):
    """Self-attention with fused ``qkv`` [3D, D], rows [head][q | k | v][head size]."""

    def __init__(self, config: NeoXConfig, layer: int) -> None:
        super().__init__(layer, config.head_size)
        width, bias = config.hidden_size, config.attention_bias
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        fused: Tensor = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))
        return fused.permute(3, 0, 2, 1, 4).unbind(0)


class ParallelBlock(PreNormBlock):
    """``x + attn(ln1(x)) + mlp(ln2(x))``: the parallel residual."""

    def forward(self, x: Tensor, span: Span, cache: KVCache | None) -> Tensor:
        mixed = x + self.attn(self.ln1(x), span, cache)
        out: Tensor = mixed + self.mlp(self.ln2(x))
        return out


class NeoX(Decoder):
    """GPT-NeoX with a language-model head of its own, unless the configuration ties it."""

    config_class = NeoXConfig
    config: NeoXConfig

    def __init__(self, config: NeoXConfig) -> None:
        width, eps = config.hidden_size, config.layer_norm_eps
        rotary = RotaryTables(config.rope, config.rope.rotary_size(config.head_size))
        super().__init__(config, width, rotary)
        block = ParallelBlock if config.use_parallel_residual else PreNormBlock
        blocks = (
            block(
                LayerNorm(width, eps),
                NeoXAttention(config, layer),
                LayerNorm(width, eps),
                FeedForward(width, config.intermediate_size, config.hidden_act),
            )
            for layer in range(config.num_hidden_layers)
        )
        self._add_blocks(blocks, LayerNorm(width, eps))
