"""GPT-NeoX: published names, and the raw partitions of its own training code ↔ local names.

Partitions are cut and merged as GPT-NeoX's tensor parallelism does it: column-parallel layers
and the vocabulary by rows, row-parallel weights by columns, norms held by every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.mapping.combining import Concat, Mean, Sum
from streamload.mapping.fields import truth, whole
from streamload.mapping.rules import KNOWN_WRAPPERS, NameMap, Rule
from streamload.mapping.tables.pieces import BLOCK, is_tied, linear, name_map, norm, vocabulary
from streamload.mapping.transforms import Transform

_WRAPPERS = (*KNOWN_WRAPPERS, "gpt_neox")
_NORMS = (("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2"))
_COLUMN_PARALLEL = (
    ("attention.query_key_value", "attn.qkv"),
    ("mlp.dense_h_to_4h", "mlp.fc1"),
)
_ROW_PARALLEL = (
    ("attention.dense", "attn.out_proj"),
    ("mlp.dense_4h_to_h", "mlp.fc2"),
)


def neox_map(config: Mapping[str, Any]) -> NameMap:
    """The published names; the head is ``embed_out``, or ``lm_head`` as newer writers call it."""
    tied = is_tied(config)
    block = "gpt_neox.layers.{layer}."
    rules = [
        vocabulary("gpt_neox.embed_in", "tok_embed", tied),
        *norm("gpt_neox.final_layer_norm", "final_ln", bias=True),
        vocabulary("embed_out", "lm_head", tied),
        Rule("lm_head.weight", "lm_head.weight", optional=True),
        # The causal mask [1, 1, T, T], its fill value and the rotary table of older writers.
        Rule(block + "attention.bias", ndim=4),
        Rule(block + "attention.masked_bias", ndim=0),
        Rule(block + "attention.rotary_emb.inv_freq", ndim=1),
    ]
    for stored, local in _NORMS:
        rules += norm(block + stored, BLOCK + local, bias=True)
    for stored, local in (*_COLUMN_PARALLEL, *_ROW_PARALLEL):
        rules += linear(block + stored, BLOCK + local, bias=_has_bias(config, stored))
    return name_map(rules, config, "gpt_neox", tied=tied, wrappers=_WRAPPERS)


def neox_raw_map(config: Mapping[str, Any]) -> NameMap:
    """Raw partitions as ``sources.neox`` names them: ``layer_{file}.model_{rank}.…``.

    File 0 is the embedding, file n + 2 block n, the final norm and the readout are files
    ``num_hidden_layers`` + 3 and + 4.

    Row-parallel biases: with the parallel residual each rank adds its own share before the
    all-reduce, so they are summed; without it each rank holds the whole bias.

    Raises:
        ValueError: the configuration does not say how many layers there are.
    """
    layers = whole(config, "num_hidden_layers")
    if layers is None:
        raise ValueError("raw partitions need num_hidden_layers")
    parallel = truth(config, "use_parallel_residual", True)
    shared: Transform = Sum() if parallel else Mean()
    tied = is_tied(config)
    block = "layer_{layer+2}.model_{rank}."
    final, head = (f"layer_{layers + after}.model_{{rank}}." for after in (3, 4))
    rules = [
        vocabulary("layer_0.model_{rank}.word_embeddings", "tok_embed", tied, Concat(0)),
        *norm(final + "norm", "final_ln", Mean(), bias=True),
        vocabulary(head + "final_linear", "lm_head", tied, Concat(0)),
        Rule(block + "attention.rotary_emb.inv_freq", ndim=1),
    ]
    for stored, local in _NORMS:
        rules += norm(block + stored, BLOCK + local, Mean(), bias=True)
    for stored, local in _COLUMN_PARALLEL:
        bias = _has_bias(config, stored)
        rules += linear(block + stored, BLOCK + local, Concat(0), bias=bias)
    for stored, local in _ROW_PARALLEL:
        rules += linear(block + stored, BLOCK + local, Concat(1), bias=False)
        if _has_bias(config, stored):
            rules.append(Rule(f"{block}{stored}.bias", f"{BLOCK}{local}.bias", shared))
    how = (
        "summed over the partitions (parallel residual: each adds its share)"
        if parallel
        else "taken once (no parallel residual: every partition holds the whole bias)"
    )
    notice = f"biases of attention.dense and mlp.dense_4h_to_h are {how}"
    return name_map(rules, config, "gpt_neox", tied=tied, wrappers=_WRAPPERS, notices=(notice,))


def _has_bias(config: Mapping[str, Any], published: str) -> bool:
    """Attention has none if ``attention_bias`` is false."""
    return not published.startswith("attention.") or truth(config, "attention_bias", True)
