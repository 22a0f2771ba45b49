"""OLMo 2 in plain torch: norms after attention and after the feed-forward part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from streamload.models.config_fields import ModelConfig, flag, number, positive_int, published
from streamload.models.decoder import Decoder
from streamload.models.layers import (
    Attention,
    GatedFeedForward,
    KVCache,
    PreNormBlock,
    RMSNorm,
    Span,
)
from streamload.models.llama_config import check_heads, check_silu, head_dim
from streamload.models.rotary import Rope, RotaryTables


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(ModelConfig):
    """Sizes and choices of an OLMo 2, under the names and defaults of its ``config.json``."""

    vocab_size: int = published(positive_int, 50304)
    hidden_size: int = published(positive_int, 4096)
    intermediate_size: int = published(positive_int, 11008)
    num_hidden_layers: int = published(positive_int, 32)
    num_attention_heads: int = published(positive_int, 32)
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = published(positive_int, 2048)
    rms_norm_eps: float = published(number, 1e-5)
    attention_bias: bool = published(flag, False)
    rope: Rope = Rope()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        check_heads(self, "olmo2")

    @classmethod
    def _derived(cls, config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        check_silu(config, "olmo2")
        heads = values["num_attention_heads"]
        return {
            "num_key_value_heads": positive_int(config, "num_key_value_heads", heads),
            "head_dim": head_dim(config, values["hidden_size"], heads),
            "rope": Rope.from_dict(config, max_positions=values["max_position_embeddings"]),
        }

    def to_dict(self) -> dict[str, Any]:
        """A ``config.json`` that transformers' ``AutoConfig`` reads as the same model."""
        values = {name: value for name, value in vars(self).items() if name != "rope"}
        own = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_act": "silu"}
        return {**own, **values, **self.rope.to_dict()}


class Olmo2Attention(Attention):
    """Grouped-query attention; queries and keys are normalised over all heads at once."""

    def __init__(self, config: Olmo2Config, layer: int) -> None:
        super().__init__(layer, config.head_dim)
        queries = config.num_attention_heads * self.head_size
        shared = config.num_key_value_heads * self.head_size
        width, bias = config.hidden_size, config.attention_bias
        self.q = nn.Linear(width, queries, bias=bias)
        self.k = nn.Linear(width, shared, bias=bias)
        self.v = nn.Linear(width, shared, bias=bias)
        self.q_norm = RMSNorm(queries, config.rms_norm_eps)
        self.k_norm = RMSNorm(shared, config.rms_norm_eps)
        self.out_proj = nn.Linear(queries, width, bias=bias)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = (self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x))
        return tuple(part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)


class PostNormBlock(PreNormBlock):
    """Attention, then the feed-forward part, each normalised before it is added to its input."""

    def forward(self, x: Tensor, span: Span, cache: KVCache | None) -> Tensor:
        x = x + self.ln1(self.attn(x, span, cache))
        out: Tensor = x + self.ln2(self.mlp(x))
        return out


class Olmo2(Decoder):
    """OLMo 2 with a language-model head."""

    config_class = Olmo2Config
    config: Olmo2Config

    def __init__(self, config: Olmo2Config) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, width, RotaryTables(config.rope, config.head_dim))
        blocks = (
            PostNormBlock(
                RMSNorm(width, eps),
                Olmo2Attention(config, layer),
                RMSNorm(width, eps),
                GatedFeedForward(width, config.intermediate_size),
            )
            for layer in range(config.num_hidden_layers)
        )
        self._add_blocks(blocks, RMSNorm(width, eps))
