"""Shapes of a reference model's tensors, from a configuration alone: no model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.core.specs import Shape


def weight_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Module name inside a block, or of the whole model → shape of its weight.

    Where a module is not listed it is a norm of the model's width. A bias has as many elements
    as its weight has rows.
    """
    width = config.get("n_embd") or config["hidden_size"]
    heads = config.get("n_head") or config["num_attention_heads"]
    size = config.get("head_dim") or width // heads
    queries, shared = heads * size, (config.get("num_key_value_heads") or heads) * size
    inner = config.get("intermediate_size") or 4 * width
    return {
        "tok_embed": (config["vocab_size"], width),
        "pos_embed": (config.get("n_positions", 0), width),
        "lm_head": (config["vocab_size"], width),
        "attn.qkv": (queries + 2 * shared, width),
        "attn.q": (queries, width),
        **dict.fromkeys(("attn.k", "attn.v"), (shared, width)),
        "attn.q_norm": (size,),
        "attn.k_norm": (size,),
        "attn.out_proj": (width, queries),
        **dict.fromkeys(("mlp.fc1", "mlp.gate", "mlp.up"), (inner, width)),
        **dict.fromkeys(("mlp.fc2", "mlp.down"), (width, inner)),
    }
