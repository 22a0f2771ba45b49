"""LLaMA, Mistral, Qwen2, Qwen3: published and original Meta names ↔ local names.

Published files hold q and k in half-split rotary form, as the models here compute it. Meta's own
files (``consolidated.00.pth``, also Mistral's ``consolidated.safetensors``) interleave the pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamload.mapping.combining import Split
from streamload.mapping.fields import truth, whole
from streamload.mapping.rules import NameMap, Rule
from streamload.mapping.tables.pieces import BLOCK, is_tied, linear, name_map, norm, vocabulary
from streamload.mapping.transforms import Interleaved


def llama_map(config: Mapping[str, Any]) -> NameMap:
    """The published names, for a ``config.json`` of any of the four families."""
    kind = str(config.get("model_type", "llama"))
    tied = is_tied(config)
    block = "model.layers.{layer}."
    out_bias = _has_output_bias(config, kind)
    rules = [
        vocabulary("model.embed_tokens", "tok_embed", tied),
        *qkv(config, block, bias=kind == "qwen2" or out_bias),
        *linear(block + "self_attn.o_proj", f"{BLOCK}attn.out_proj", bias=out_bias),
        *gated_feed_forward(block, bias=kind == "llama" and truth(config, "mlp_bias", False)),
        *norm(block + "input_layernorm", f"{BLOCK}ln1"),
        *norm(block + "post_attention_layernorm", f"{BLOCK}ln2"),
        *norm("model.norm", "final_ln"),
        vocabulary("lm_head", "lm_head", tied),
        # Rotary tables that old writers stored; the models compute them in float32.
        Rule(block + "self_attn.rotary_emb.inv_freq", ndim=1),
        Rule("rope.freqs", ndim=1),
    ]
    if kind == "qwen3":
        rules += norm(block + "self_attn.q_norm", f"{BLOCK}attn.q_norm")
        rules += norm(block + "self_attn.k_norm", f"{BLOCK}attn.k_norm")
    return name_map(rules, config, kind, tied=tied)


def llama_meta_map(config: Mapping[str, Any]) -> NameMap:
    """Meta's original names; q and k rows are interleaved pairs.

    Raises:
        ValueError: the configuration does not say how many heads there are.
    """
    heads = whole(config, "num_attention_heads", least=1)
    if heads is None:
        raise ValueError("Meta's names need num_attention_heads")
    tied = is_tied(config)
    block = "layers.{layer}."
    shared = Interleaved(_kv_heads(config, heads))
    rules = [
        vocabulary("tok_embeddings", "tok_embed", tied),
        *linear(block + "attention.wq", f"{BLOCK}attn.q", Interleaved(heads), bias=False),
        *linear(block + "attention.wk", f"{BLOCK}attn.k", shared, bias=False),
        *linear(block + "attention.wv", f"{BLOCK}attn.v", bias=False),
        *linear(block + "attention.wo", f"{BLOCK}attn.out_proj", bias=False),
        *linear(block + "feed_forward.w1", f"{BLOCK}mlp.gate", bias=False),
        *linear(block + "feed_forward.w3", f"{BLOCK}mlp.up", bias=False),
        *linear(block + "feed_forward.w2", f"{BLOCK}mlp.down", bias=False),
        *norm(block + "attention_norm", f"{BLOCK}ln1"),
        *norm(block + "ffn_norm", f"{BLOCK}ln2"),
        *norm("norm", "final_ln"),
        vocabulary("output", "lm_head", tied),
        Rule("rope.freqs", ndim=1),
        Rule(block + "attention.inner_attention.rope.freqs", ndim=1),
    ]
    return name_map(rules, config, str(config.get("model_type", "llama")), tied=tied)


def fused_local_map(config: Mapping[str, Any]) -> NameMap:
    """Local names as version 0.1 wrote them: queries, keys and values in one matrix.

    Raises:
        ValueError: the configuration does not say where they are to be cut.
    """
    sizes = _qkv_sizes(config)
    if sizes is None:
        raise ValueError("fused names need num_attention_heads and the size of a head")
    published = llama_map(config)
    apart = tuple(f"{BLOCK}attn.{part}." for part in "qkv")
    names = {name: r for r in published.rules for name in r.targets}
    rules = [
        Rule(name, name, optional=rule.optional)
        for name, rule in names.items()
        if not name.startswith(apart)
    ]
    rules += [
        Rule(f"{BLOCK}attn.qkv.{end}", [f"{part}{end}" for part in apart], Split(0, sizes))
        for end in ("weight", "bias")
        if f"{apart[0]}{end}" in names
    ]
    return replace(published, rules=tuple(rules))


def qkv(config: Mapping[str, Any], block: str, *, bias: bool) -> list[Rule]:
    """Queries, keys and values.

    Raises:
        ValueError: the configuration gives no number where their sizes follow from one.
    """
    _qkv_sizes(config)
    return [
        rule
        for part in "qkv"
        for rule in linear(f"{block}self_attn.{part}_proj", f"{BLOCK}attn.{part}", bias=bias)
    ]


def gated_feed_forward(block: str, *, bias: bool = False) -> list[Rule]:
    """The rules of gate, up and down."""
    return [
        rule
        for part in ("gate", "up", "down")
        for rule in linear(f"{block}mlp.{part}_proj", f"{BLOCK}mlp.{part}", bias=bias)
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
