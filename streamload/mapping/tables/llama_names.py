"""LLaMA, Mistral, Qwen2, Qwen3: published and original Meta names ↔ local names.

Published files hold q and k in half-split rotary form, as the models here compute it. Meta's own
files (``consolidated.00.pth``, also Mistral's ``consolidated.safetensors``) interleave the pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.mapping.combining import Concat
from streamload.mapping.fields import truth, whole
from streamload.mapping.rules import NameMap, Rule
from streamload.mapping.transforms import Identity, Interleaved

__all__ = ["llama_map", "llama_meta_map"]

_TIE = ("tok_embed.weight", "lm_head.weight")


def llama_map(config: Mapping[str, Any]) -> NameMap:
    """The published names, for a ``config.json`` of any of the four families."""
    kind = str(config.get("model_type", "llama"))
    tied = truth(config, "tie_word_embeddings", False)
    block = "model.layers.{layer}."
    rules = [
        Rule("model.embed_tokens.weight", "tok_embed.weight", optional=tied),
        *_qkv(config, kind, block),
        *_linear(block + "self_attn.o_proj", "attn.out_proj", _has_output_bias(config, kind)),
        *_feed_forward(config, kind, block),
        _block_rule(block + "input_layernorm.weight", "ln1.scale"),
        _block_rule(block + "post_attention_layernorm.weight", "ln2.scale"),
        Rule("model.norm.weight", "final_ln.scale"),
        Rule("lm_head.weight", "lm_head.weight", optional=tied),
        # Rotary tables that old writers stored; the models compute them in float32.
        Rule(block + "self_attn.rotary_emb.inv_freq", ndim=1),
        Rule("rope.freqs", ndim=1),
    ]
    if kind == "qwen3":
        rules += [
            _block_rule(block + "self_attn.q_norm.weight", "attn.q_norm.scale"),
            _block_rule(block + "self_attn.k_norm.weight", "attn.k_norm.scale"),
        ]
    return _name_map(rules, config, kind, tied)


def llama_meta_map(config: Mapping[str, Any]) -> NameMap:
    """Meta's original names; q and k rows are interleaved pairs.

    Raises:
        ValueError: the configuration does not say how many heads there are.
    """
    kind = str(config.get("model_type", "llama"))
    sizes = _qkv_sizes(config)
    heads = whole(config, "num_attention_heads", least=1)
    if sizes is None or heads is None:
        raise ValueError("Meta's names need num_attention_heads and the size of a head")
    tied = truth(config, "tie_word_embeddings", False)
    block = "layers.{layer}."
    each = (Interleaved(heads), Interleaved(_kv_heads(config, heads)), Identity())
    parts = tuple(f"{block}attention.w{part}.weight" for part in "qkv")
    rules = [
        Rule("tok_embeddings.weight", "tok_embed.weight", optional=tied),
        _block_rule(parts, "attn.qkv.weight", Concat(0, sizes, each)),
        _block_rule(block + "attention.wo.weight", "attn.out_proj.weight"),
        _block_rule(block + "feed_forward.w1.weight", "mlp.gate.weight"),
        _block_rule(block + "feed_forward.w3.weight", "mlp.up.weight"),
        _block_rule(block + "feed_forward.w2.weight", "mlp.down.weight"),
        _block_rule(block + "attention_norm.weight", "ln1.scale"),
        _block_rule(block + "ffn_norm.weight", "ln2.scale"),
        Rule("norm.weight", "final_ln.scale"),
        Rule("output.weight", "lm_head.weight", optional=tied),
        Rule("rope.freqs", ndim=1),
        Rule(block + "attention.inner_attention.rope.freqs", ndim=1),
    ]
    return _name_map(rules, config, kind, tied)


def _name_map(rules: list[Rule], config: Mapping[str, Any], kind: str, tied: bool) -> NameMap:
    return NameMap(
        tuple(rules),
        layers=whole(config, "num_hidden_layers"),
        ties=(_TIE,) if tied else (),
        model_type=kind,
    )


def _block_rule(
    sources: str | tuple[str, ...], local: str, transform: Concat | None = None
) -> Rule:
    return Rule(sources, f"blocks.{{layer}}.{local}", transform)


def _linear(published: str, local: str, has_bias: bool) -> list[Rule]:
    endings = ("weight", "bias") if has_bias else ("weight",)
    return [_block_rule(f"{published}.{end}", f"{local}.{end}") for end in endings]


def _feed_forward(config: Mapping[str, Any], kind: str, block: str) -> list[Rule]:
    has_bias = kind == "llama" and truth(config, "mlp_bias", False)
    return [
        rule
        for part in ("gate", "up", "down")
        for rule in _linear(f"{block}mlp.{part}_proj", f"mlp.{part}", has_bias)
    ]


def _qkv(config: Mapping[str, Any], kind: str, block: str) -> list[Rule]:
    has_bias = kind == "qwen2" or _has_output_bias(config, kind)
    fused = Concat(0, _qkv_sizes(config))
    return [
        _block_rule(
            tuple(f"{block}self_attn.{part}_proj.{end}" for part in "qkv"),
            f"attn.qkv.{end}",
            fused,
        )
        for end in (("weight", "bias") if has_bias else ("weight",))
    ]


def _has_output_bias(config: Mapping[str, Any], kind: str) -> bool:
    """``attention_bias`` is for q, k, v and the output; Mistral and Qwen2 do not know it."""
    return kind in ("llama", "qwen3") and truth(config, "attention_bias", False)


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    return whole(config, "num_key_value_heads", least=1) or heads


def _qkv_sizes(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Rows of q, k and v; None if the configuration does not say, then the shapes decide."""
    heads = whole(config, "num_attention_heads", least=1)
    width = whole(config, "hidden_size", least=1)
    size = whole(config, "head_dim", least=1)
    if size is None and config.get("model_type") == "qwen3":
        size = 128  # what Qwen3 means by leaving it out, whatever the width
    if heads is None or (size is None and width is None):
        return None
    if size is None:
        size = (width or 0) // heads
    shared = _kv_heads(config, heads) * size
    return heads * size, shared, shared
