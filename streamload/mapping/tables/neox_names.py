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
from streamload.mapping.transforms import Transform

__all__ = ["neox_map", "neox_raw_map"]

_TIE = ("tok_embed.weight", "lm_head.weight")
_NORMS = (("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2"))
_COLUMN_PARALLEL = (
    ("attention.query_key_value", "attn.qkv"),
    ("mlp.dense_h_to_4h", "mlp.fc1"),
)
_ROW_PARALLEL = (
    ("attention.dense", "attn.out_proj"),
    ("mlp.dense_4h_to_h", "mlp.fc2"),
)
_NORM_PARTS = (("weight", "scale"), ("bias", "shift"))


def neox_map(config: Mapping[str, Any]) -> NameMap:
    """The published names; the head is ``embed_out``, or ``lm_head`` as newer writers call it."""
    tied = _is_tied(config)
    block = "gpt_neox.layers.{layer}."
    rules = [
        Rule("gpt_neox.embed_in.weight", "tok_embed.weight", optional=tied),
        *_norm("gpt_neox.final_layer_norm", "final_ln"),
        Rule("embed_out.weight", "lm_head.weight", optional=tied),
        Rule("lm_head.weight", "lm_head.weight", optional=True),
        # The causal mask [1, 1, T, T], its fill value and the rotary table of older writers.
        Rule(block + "attention.bias", ndim=4),
        Rule(block + "attention.masked_bias", ndim=0),
        Rule(block + "attention.rotary_emb.inv_freq", ndim=1),
    ]
    for published, local in _NORMS:
        rules += _norm(block + published, f"blocks.{{layer}}.{local}")
    for published, local in (*_COLUMN_PARALLEL, *_ROW_PARALLEL):
        for end in _ends(config, published):
            rules.append(
                Rule(f"{block}{published}.{end}", f"blocks.{{layer}}.{local}.{end}"),
            )
    return _name_map(rules, config, ties=tied)


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
    tied = _is_tied(config)
    block = "layer_{layer+2}.model_{rank}."
    norm, head = (f"layer_{layers + after}.model_{{rank}}." for after in (3, 4))
    rules = [
        Rule(
            "layer_0.model_{rank}.word_embeddings.weight",
            "tok_embed.weight",
            Concat(0),
            optional=tied,
        ),
        *_norm(norm + "norm", "final_ln", Mean()),
        Rule(head + "final_linear.weight", "lm_head.weight", Concat(0), optional=tied),
        Rule(block + "attention.rotary_emb.inv_freq", ndim=1),
    ]
    for stored, local in _NORMS:
        rules += _norm(block + stored, f"blocks.{{layer}}.{local}", Mean())
    for stored, local in _COLUMN_PARALLEL:
        rules += [
            Rule(f"{block}{stored}.{end}", f"blocks.{{layer}}.{local}.{end}", Concat(0))
            for end in _ends(config, stored)
        ]
    for stored, local in _ROW_PARALLEL:
        rules += [
            Rule(
                f"{block}{stored}.{end}",
                f"blocks.{{layer}}.{local}.{end}",
                Concat(1) if end == "weight" else shared,
            )
            for end in _ends(config, stored)
        ]
    how = (
        "summed over the partitions (parallel residual: each adds its share)"
        if parallel
        else "taken once (no parallel residual: every partition holds the whole bias)"
    )
    notice = f"biases of attention.dense and mlp.dense_4h_to_h are {how}"
    return _name_map(rules, config, ties=tied, notices=(notice,))


def _name_map(
    rules: list[Rule], config: Mapping[str, Any], *, ties: bool, notices: tuple[str, ...] = ()
) -> NameMap:
    return NameMap(
        tuple(rules),
        layers=whole(config, "num_hidden_layers"),
        ties=(_TIE,) if ties else (),
        wrappers=(*KNOWN_WRAPPERS, "gpt_neox"),
        model_type="gpt_neox",
        notices=notices,
    )


def _is_tied(config: Mapping[str, Any]) -> bool:
    return truth(config, "tie_word_embeddings", False)


def _ends(config: Mapping[str, Any], published: str) -> tuple[str, ...]:
    """Weight and bias; attention has none if ``attention_bias`` is false."""
    bare = published.startswith("attention.") and not truth(config, "attention_bias", True)
    return ("weight",) if bare else ("weight", "bias")


def _norm(stored: str, local: str, transform: Transform | None = None) -> list[Rule]:
    return [Rule(f"{stored}.{end}", f"{local}.{part}", transform) for end, part in _NORM_PARTS]
