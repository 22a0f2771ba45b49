"""OLMo 2: published names ↔ local names; ``ln1`` and ``ln2`` come after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.core.specs import Shape
from streamload.mapping.fields import truth
from streamload.mapping.rules import NameMap
from streamload.mapping.tables.llama_names import gated_feed_forward, qkv
from streamload.mapping.tables.pieces import BLOCK, is_tied, linear, name_map, norm, vocabulary
from streamload.mapping.tables.shapes import weight_shapes


def olmo2_map(config: Mapping[str, Any]) -> NameMap:
    """The published names."""
    tied = is_tied(config)
    bias = truth(config, "attention_bias", False)
    block = "model.layers.{layer}."
    rules = [
        vocabulary("model.embed_tokens", "tok_embed", tied),
        *qkv(config, block, bias=bias),
        *norm(block + "self_attn.q_norm", f"{BLOCK}attn.q_norm"),
        *norm(block + "self_attn.k_norm", f"{BLOCK}attn.k_norm"),
        *linear(block + "self_attn.o_proj", f"{BLOCK}attn.out_proj", bias=bias),
        *norm(block + "post_attention_layernorm", f"{BLOCK}ln1"),
        *gated_feed_forward(block),
        *norm(block + "post_feedforward_layernorm", f"{BLOCK}ln2"),
        *norm("model.norm", "final_ln"),
        vocabulary("lm_head", "lm_head", tied),
    ]
    return name_map(rules, config, "olmo2", tied=tied)


def olmo2_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """As ``weight_shapes``; queries and keys are normalised over all heads at once."""
    shapes = weight_shapes(config)
    return shapes | {f"attn.{part}_norm": shapes[f"attn.{part}"][:1] for part in "qk"}
