"""GPT-NeoX in plain torch: the 20B model and Pythia."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
from streamload.models.rotary import Rope, RotaryTables, rotate

__all__ = ["NeoX", "NeoXConfig"]


@dataclass(frozen=True)
class NeoXConfig:
    """Sizes and choices of a GPT-NeoX, under the names and defaults of its ``config.json``."""

    vocab_size: int = 50432
    hidden_size: int = 6144
    intermediate_size: int = 24576
    num_hidden_layers: int = 44
    num_attention_heads: int = 64
    max_position_embeddings: int = 2048
    layer_norm_eps: float = 1e-5
    hidden_act: str = "gelu"
    use_parallel_residual: bool = True
    attention_bias: bool = True
    tie_word_embeddings: bool = False
    rope: Rope = Rope(partial=0.25)  # noqa: RUF009 (frozen)
    bos_token_id: int | tuple[int, ...] | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> NeoXConfig:
        """Read a GPT-NeoX ``config.json``.

        The rotary fields may be ``rotary_pct`` and ``rotary_emb_base``, or
        ``partial_rotary_factor`` and ``rope_theta`` inside ``rope_parameters``.

        Raises:
            ValueError: a field of the wrong kind or sizes that do not fit each other, an
                activation or a rotary scaling that is not known.
        """
        positions = positive_int(config, "max_position_embeddings", 2048)
        name = text(config, "hidden_act", "gelu")
        activation(name)
        made = cls(
            vocab_size=positive_int(config, "vocab_size", 50432),
            hidden_size=positive_int(config, "hidden_size", 6144),
            intermediate_size=positive_int(config, "intermediate_size", 24576),
            num_hidden_layers=positive_int(config, "num_hidden_layers", 44),
            num_attention_heads=positive_int(config, "num_attention_heads", 64),
            max_position_embeddings=positions,
            layer_norm_eps=number(config, "layer_norm_eps", 1e-5),
            hidden_act=name,
            use_parallel_residual=flag(config, "use_parallel_residual", True),
            attention_bias=flag(config, "attention_bias", True),
            tie_word_embeddings=flag(config, "tie_word_embeddings", False),
            rope=Rope.from_dict(
                config,
                max_positions=positions,
                theta_name="rotary_emb_base",
                partial_name="rotary_pct",
                partial_default=0.25,
            ),
            bos_token_id=optional_id(config, "bos_token_id"),
            eos_token_id=optional_id(config, "eos_token_id"),
        )
        made._check_sizes()
        return made

    def to_dict(self) -> dict[str, Any]:
        """A ``config.json`` that transformers' ``AutoConfig`` reads as the same model."""
        fields = {name: value for name, value in vars(self).items() if name != "rope"}
        rope = self.rope.to_dict()
        return {
            "model_type": "gpt_neox",
            "architectures": ["GPTNeoXForCausalLM"],
            **fields,
            "rotary_pct": self.rope.partial,
            "rotary_emb_base": rope["rope_theta"],
            "rope_scaling": rope["rope_scaling"],
        }

    def _check_sizes(self) -> None:
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


class Attention(nn.Module):
    """Self-attention with fused ``qkv`` [3D, D], rows [head][q | k | v][head size]."""

    def __init__(self, config: NeoXConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads
        self.head_size = config.head_size
        self.scale = self.head_size**-0.5
        width, bias = config.hidden_size, config.attention_bias
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, span: Span, cache: KVCache | None) -> Tensor:
        """[batch, n, D] to [batch, n, D]."""
        batch, count, _ = x.shape
        fused = self.qkv(x).view(batch, count, self.heads, 3, self.head_size)
        q, k, v = fused.permute(3, 0, 2, 1, 4).unbind(0)
        cos, sin = span.rotary(q)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        mixed: Tensor = self.out_proj(attend(q, k, v, span=span, scale=self.scale))
        return mixed


class MLP(nn.Module):
    """``fc1``, activation, ``fc2``."""

    def __init__(self, config: NeoXConfig) -> None:
        super().__init__()
        self.act = activation(config.hidden_act)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        mixed: Tensor = self.fc2(self.act(self.fc1(x)))
        return mixed


class NeoXBlock(nn.Module):
    """``x + attn(ln1(x)) + mlp(ln2(x))`` with the parallel residual, else one after the other."""

    def __init__(self, config: NeoXConfig, layer: int) -> None:
        super().__init__()
        self.parallel = config.use_parallel_residual
        self.ln1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attn = Attention(config, layer)
        self.ln2 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, span: Span, cache: KVCache | None) -> Tensor:
        """[batch, n, D] to [batch, n, D]."""
        mixed = x + self.attn(self.ln1(x), span, cache)
        out: Tensor = mixed + self.mlp(self.ln2(x if self.parallel else mixed))
        return out


class NeoX(Decoder):
    """GPT-NeoX with a language-model head of its own, unless the configuration ties it.

    No position table limits the context: beyond ``max_position_embeddings`` it computes, at
    whatever quality.
    """

    def __init__(self, config: NeoXConfig) -> None:
        super().__init__()
        self.config = config
        self._rotary = RotaryTables(config.rope, config.rope.rotary_size(config.head_size))
        self.tok_embed = embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            NeoXBlock(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.final_ln = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.tok_embed.weight

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> NeoX:
        """The model that a ``config.json`` describes, with random weights.

        Raises:
            ValueError: see ``NeoXConfig.from_dict``.
        """
        return cls(NeoXConfig.from_dict(config))

    def _span(self, start: int, count: int) -> Span:
        return Span(start, count, self._rotary)
