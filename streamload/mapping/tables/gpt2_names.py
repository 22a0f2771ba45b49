"""GPT-2: published names (Conv1D weights are [in, out]) ↔ the lesson's local names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.mapping.rules import NameMap, Rule
from streamload.mapping.tables.pieces import BLOCK, is_tied, name_map, norm, vocabulary
from streamload.mapping.transforms import Transpose


def gpt2_map(config: Mapping[str, Any]) -> NameMap:
    """The table for a GPT-2 ``config.json``; only ``n_layer`` and the tie are looked at."""
    tied = is_tied(config, True)
    rules = [
        vocabulary("wte", "tok_embed", tied),
        Rule("wpe.weight", "pos_embed.weight"),
        *norm("h.{layer}.ln_1", f"{BLOCK}ln1", bias=True),
        *_conv1d("attn.c_attn", "attn.qkv"),
        *_conv1d("attn.c_proj", "attn.out_proj"),
        *norm("h.{layer}.ln_2", f"{BLOCK}ln2", bias=True),
        *_conv1d("mlp.c_fc", "mlp.fc1"),
        *_conv1d("mlp.c_proj", "mlp.fc2"),
        *norm("ln_f", "final_ln", bias=True),
        vocabulary("lm_head", "lm_head", tied),
        # The causal mask [1, 1, T, T] and its fill value: buffers of the published class.
        Rule("h.{layer}.attn.bias", ndim=4),
        Rule("h.{layer}.attn.masked_bias", ndim=0),
    ]
    return name_map(rules, config, "gpt2", tied=tied, layer_count_field="n_layer")


def _conv1d(published: str, local: str) -> tuple[Rule, Rule]:
    start = f"h.{{layer}}.{published}"
    return (
        Rule(f"{start}.weight", f"{BLOCK}{local}.weight", Transpose()),
        Rule(f"{start}.bias", f"{BLOCK}{local}.bias"),
    )
