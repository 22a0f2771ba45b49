"""GPT-2: published names (Conv1D weights are [in, out]) ↔ the lesson's local names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.mapping.fields import truth, whole
from streamload.mapping.rules import NameMap, Rule
from streamload.mapping.transforms import Transpose

__all__ = ["gpt2_map"]

_BLOCK = (
    ("ln_1.weight", "ln1.scale"),
    ("ln_1.bias", "ln1.shift"),
    ("attn.c_attn.weight", "attn.qkv.weight"),
    ("attn.c_attn.bias", "attn.qkv.bias"),
    ("attn.c_proj.weight", "attn.out_proj.weight"),
    ("attn.c_proj.bias", "attn.out_proj.bias"),
    ("ln_2.weight", "ln2.scale"),
    ("ln_2.bias", "ln2.shift"),
    ("mlp.c_fc.weight", "mlp.fc1.weight"),
    ("mlp.c_fc.bias", "mlp.fc1.bias"),
    ("mlp.c_proj.weight", "mlp.fc2.weight"),
    ("mlp.c_proj.bias", "mlp.fc2.bias"),
)


def gpt2_map(config: Mapping[str, Any]) -> NameMap:
    """The table for a GPT-2 ``config.json``; only ``n_layer`` and the tie are looked at."""
    tied = truth(config, "tie_word_embeddings", True)
    rules = [
        Rule("wte.weight", "tok_embed.weight", optional=tied),
        Rule("wpe.weight", "pos_embed.weight"),
    ]
    for published, local in _BLOCK:
        is_matrix = ".c_" in published and published.endswith(".weight")
        rules.append(
            Rule(
                f"h.{{layer}}.{published}",
                f"blocks.{{layer}}.{local}",
                Transpose() if is_matrix else None,
            )
        )
    rules += [
        Rule("ln_f.weight", "final_ln.scale"),
        Rule("ln_f.bias", "final_ln.shift"),
        Rule("lm_head.weight", "lm_head.weight", optional=tied),
        # The causal mask [1, 1, T, T] and its fill value: buffers of the published class.
        Rule("h.{layer}.attn.bias", ndim=4),
        Rule("h.{layer}.attn.masked_bias", ndim=0),
    ]
    return NameMap(
        tuple(rules),
        layers=whole(config, "n_layer"),
        ties=(("tok_embed.weight", "lm_head.weight"),) if tied else (),
        model_type="gpt2",
    )
