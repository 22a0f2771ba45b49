"""The LLaMA shape in plain torch: LLaMA, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from streamload.models.decoder import Decoder
from streamload.models.layers import Attention, GatedFeedForward, PreNormBlock, RMSNorm
from streamload.models.llama_config import LlamaConfig, layer_types_of
from streamload.models.rotary import RotaryTables


class LlamaAttention(Attention):
    """Grouped-query attention; ``q`` [H*h, D], ``k`` and ``v`` [K*h, D] are apart, as in files."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__(layer, config.head_dim, config.windows[layer])
        width, bias = config.hidden_size, config.qkv_bias
        queries = config.num_attention_heads * self.head_size
        shared = config.num_key_value_heads * self.head_size
        self.q = nn.Linear(width, queries, bias=bias)
        self.k = nn.Linear(width, shared, bias=bias)
        self.v = nn.Linear(width, shared, bias=bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.has_qk_norm:
            self.q_norm = RMSNorm(self.head_size, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_size, config.rms_norm_eps)
        self.out_proj = nn.Linear(queries, width, bias=config.out_bias)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


class Llama(Decoder):
    """A LLaMA-shaped language model."""

    config_class = LlamaConfig
    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, width, RotaryTables(config.rope, config.head_dim))
        blocks = (
            PreNormBlock(
                RMSNorm(width, eps),
                LlamaAttention(config, layer),
                RMSNorm(width, eps),
                GatedFeedForward(width, config.intermediate_size, bias=config.mlp_bias),
            )
            for layer in range(config.num_hidden_layers)
        )
        self._add_blocks(blocks, RMSNorm(width, eps))

    @classmethod
    def layer_types(cls, config: Mapping[str, Any]) -> list[str] | None:
        """Qwen's types of layers; its older files tell them by index."""
        total = config.get("num_hidden_layers")
        if config["model_type"] not in ("qwen2", "qwen3") or not isinstance(total, int):
            return None
        return layer_types_of(config, total)
