"""The configuration of the LLaMA-shaped families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamload.models.fields import flag, number, optional_id, positive_int, text
from streamload.models.rotary import Rope

__all__ = ["LlamaConfig", "layer_types_of"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and choices of a LLaMA-shaped model.

    Fields have the names of ``config.json`` where it has one. ``windows`` gives each layer's
    sliding window in positions, None for full attention.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    bos_token_id: int | tuple[int, ...] | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head (Qwen3)."""
        return self.model_type == "qwen3"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a ``config.json`` of a known ``model_type``, in its old and its new form.

        Raises:
            ValueError: a field of the wrong kind or sizes that do not fit each other, an
                activation other than silu, or a rotary scaling or layer type that is not known.
        """
        kind = text(config, "model_type", "llama")
        if kind not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ValueError(f"model type {kind!r} is not LLaMA-shaped; known: {known}")
        act = text(config, "hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise ValueError(f"activation {act!r} is not supported for {kind}; known: silu")
        width = positive_int(config, "hidden_size", 4096)
        heads = positive_int(config, "num_attention_heads", 32)
        layers = positive_int(config, "num_hidden_layers", 32)
        positions = positive_int(config, "max_position_embeddings", 2048)
        qkv_bias, out_bias = _attention_biases(kind, config)
        made = cls(
            model_type=kind,
            vocab_size=positive_int(config, "vocab_size", 32000),
            hidden_size=width,
            intermediate_size=positive_int(config, "intermediate_size", 11008),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=positive_int(config, "num_key_value_heads", heads),
            head_dim=_head_dim(kind, config, width, heads),
            max_position_embeddings=positions,
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
            rope=Rope.from_dict(config, max_positions=positions),
            windows=_windows(kind, config, layers),
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            mlp_bias=kind == "llama" and flag(config, "mlp_bias", False),
            tie_word_embeddings=flag(config, "tie_word_embeddings", False),
            bos_token_id=optional_id(config, "bos_token_id"),
            eos_token_id=optional_id(config, "eos_token_id"),
        )
        made._check_sizes()
        return made

    def to_dict(self) -> dict[str, Any]:
        """A ``config.json`` that transformers' ``AutoConfig`` reads as the same model."""
        own = {"rope", "windows", "qkv_bias", "out_bias", "mlp_bias"}
        fields = {name: value for name, value in vars(self).items() if name not in own}
        fields |= {"architectures": [_ARCHITECTURES[self.model_type]], "hidden_act": "silu"}
        fields |= self.rope.to_dict()
        if self.model_type in ("llama", "qwen3"):
            fields["attention_bias"] = self.qkv_bias
        if self.model_type == "llama":
            fields["mlp_bias"] = self.mlp_bias
        return fields | self._window_fields()

    def _window_fields(self) -> dict[str, Any]:
        window = next((size for size in self.windows if size is not None), None)
        if self.model_type == "llama":
            return {}
        if self.model_type == "mistral":
            return {"sliding_window": window}
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": [_FULL if size is None else _SLIDING for size in self.windows],
        }

    def _check_sizes(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions: {self.head_dim}")
        if self.rope.partial != 1.0:
            raise ValueError(
                f"partial_rotary_factor {self.rope.partial} is not supported for {self.model_type}"
            )


def _head_dim(kind: str, config: Mapping[str, Any], width: int, heads: int) -> int:
    if config.get("head_dim") is None and kind != "qwen3":
        if width % heads:
            raise ValueError(f"hidden_size {width} is not a multiple of the {heads} heads")
        return width // heads
    # Qwen3 files that leave it out mean 128, whatever the width.
    return positive_int(config, "head_dim", 128)


def _attention_biases(kind: str, config: Mapping[str, Any]) -> tuple[bool, bool]:
    """Biases of q, k and v, and of the output."""
    if kind == "mistral":
        return False, False
    if kind == "qwen2":
        return True, False
    both = flag(config, "attention_bias", False)
    return both, both


def _windows(kind: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    size: int | None = None
    # Mistral without the field means 4096 (its configuration's default), null means none.
    if kind == "mistral" and config.get("sliding_window", 4096) is not None:
        size = positive_int(config, "sliding_window", 4096)
    if kind in ("qwen2", "qwen3") and flag(config, "use_sliding_window", False):
        size = positive_int(config, "sliding_window", 4096)
    if kind in ("llama", "mistral"):
        return (size,) * layers
    types = layer_types_of(config, layers)
    if _SLIDING in types and size is None:
        raise ValueError("layer_types has sliding_attention, but use_sliding_window is not set")
    return tuple(size if one == _SLIDING else None for one in types)


def layer_types_of(config: Mapping[str, Any], layers: int) -> list[str]:
    """Qwen's ``layer_types``, or what ``max_window_layers`` says in older files.

    Raises:
        ValueError: another number of types than layers, or a type that is not known.
    """
    types = config.get("layer_types")
    if types is None:
        full = layers
        if flag(config, "use_sliding_window", False):
            full = config.get("max_window_layers", 28)
        if isinstance(full, bool) or not isinstance(full, int):
            raise ValueError(f"config field 'max_window_layers' must be a whole number: {full!r}")
        return [_FULL if layer < full else _SLIDING for layer in range(layers)]
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise ValueError(f"config field 'layer_types' must list the {layers} layers: {types!r}")
    for one in types:
        if one not in (_FULL, _SLIDING):
            raise ValueError(f"layer type {one!r} is not supported; known: {_FULL}, {_SLIDING}")
    return list(types)
