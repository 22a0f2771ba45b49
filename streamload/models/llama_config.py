"""The configuration of the LLaMA-shaped families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamload.models.config_fields import ModelConfig, flag, number, positive_int, published, text
from streamload.models.rotary import Rope

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def check_silu(config: Mapping[str, Any], kind: str) -> None:
    """Raise a ValueError if ``hidden_act`` is another activation."""
    name = text(config, "hidden_act", "silu")
    if name not in ("silu", "swish"):
        raise ValueError(f"activation {name!r} is not supported for {kind}; known: silu")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Sizes and choices of a LLaMA-shaped model.

    Fields have the names of ``config.json`` where it has one. ``windows`` gives each layer's
    sliding window in positions, None for full attention.
    """

    model_type: str = published(text, "llama")
    vocab_size: int = published(positive_int, 32000)
    hidden_size: int = published(positive_int, 4096)
    intermediate_size: int = published(positive_int, 11008)
    num_hidden_layers: int = published(positive_int, 32)
    num_attention_heads: int = published(positive_int, 32)
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = published(positive_int, 2048)
    rms_norm_eps: float = published(number, 1e-6)
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head (Qwen3)."""
        return self.model_type == "qwen3"

    @classmethod
    def _derived(cls, config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        kind, heads = values["model_type"], values["num_attention_heads"]
        if kind not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ValueError(f"model type {kind!r} is not LLaMA-shaped; known: {known}")
        check_silu(config, kind)
        qkv_bias, out_bias = _attention_biases(kind, config)
        return {
            "num_key_value_heads": positive_int(config, "num_key_value_heads", heads),
            # Qwen3 files that leave it out mean 128, whatever the width.
            "head_dim": head_dim(
                config, values["hidden_size"], heads, 128 if kind == "qwen3" else None
            ),
            "rope": Rope.from_dict(config, max_positions=values["max_position_embeddings"]),
            "windows": _windows(kind, config, values["num_hidden_layers"]),
            "qkv_bias": qkv_bias,
            "out_bias": out_bias,
            "mlp_bias": kind == "llama" and flag(config, "mlp_bias", False),
        }

    def to_dict(self) -> dict[str, Any]:
        """A ``config.json`` that transformers' ``AutoConfig`` reads as the same model."""
        own = {"rope", "windows", "qkv_bias", "out_bias", "mlp_bias"}
        values = {name: value for name, value in vars(self).items() if name not in own}
        values |= {"architectures": [_ARCHITECTURES[self.model_type]], "hidden_act": "silu"}
        values |= self.rope.to_dict()
        if self.model_type in ("llama", "qwen3"):
            values["attention_bias"] = self.qkv_bias
        if self.model_type == "llama":
            values["mlp_bias"] = self.mlp_bias
        return values | self._window_fields()

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

    def __post_init__(self) -> None:
        check_heads(self, self.model_type)


def check_heads(config: Any, kind: str) -> None:
    """Raise a ValueError if groups of heads come out uneven or a head is not rotated whole."""
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if heads % shared:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary positions: {config.head_dim}")
    if config.rope.partial != 1.0:
        raise ValueError(f"partial_rotary_factor {config.rope.partial} is not supported for {kind}")


def head_dim(config: Mapping[str, Any], width: int, heads: int, default: int | None = None) -> int:
    """The size of a head; without a default, an absent one is its share of the width."""
    if config.get("head_dim") is None and default is None and width % heads:
        raise ValueError(f"hidden_size {width} is not a multiple of the {heads} heads")
    return positive_int(config, "head_dim", default or width // heads)


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
