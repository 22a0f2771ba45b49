"""What the tables are put together from: the rules of one linear layer, one norm, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.mapping.fields import truth, whole
from streamload.mapping.rules import KNOWN_WRAPPERS, NameMap, Rule
from streamload.mapping.transforms import Transform

BLOCK = "blocks.{layer}."
_TIE = ("tok_embed.weight", "lm_head.weight")


def linear(
    published: str | tuple[str, ...],
    local: str,
    transform: Transform | None = None,
    *,
    bias: bool = True,
) -> list[Rule]:
    """Weight and bias; several published layers for a fused local one."""
    names = (published,) if isinstance(published, str) else published
    return [
        Rule(tuple(f"{name}.{end}" for name in names), f"{local}.{end}", transform)
        for end in (("weight", "bias") if bias else ("weight",))
    ]


def norm(
    published: str, local: str, transform: Transform | None = None, *, bias: bool = False
) -> list[Rule]:
    """Weight and bias of a norm, which are a scale and a shift here."""
    ends = (("weight", "scale"), ("bias", "shift")) if bias else (("weight", "scale"),)
    return [Rule(f"{published}.{end}", f"{local}.{part}", transform) for end, part in ends]


def vocabulary(published: str, local: str, tied: bool, transform: Transform | None = None) -> Rule:
    """The embedding or the head; either may be absent where they are one tensor."""
    return Rule(f"{published}.weight", f"{local}.weight", transform, optional=tied)


def is_tied(config: Mapping[str, Any], default: bool = False) -> bool:
    return truth(config, "tie_word_embeddings", default)


def name_map(
    rules: list[Rule],
    config: Mapping[str, Any],
    model_type: str,
    *,
    tied: bool,
    layer_count_field: str = "num_hidden_layers",
    wrappers: tuple[str, ...] = KNOWN_WRAPPERS,
    notices: tuple[str, ...] = (),
) -> NameMap:
    return NameMap(
        tuple(rules),
        layers=whole(config, layer_count_field),
        ties=(_TIE,) if tied else (),
        wrappers=wrappers,
        model_type=model_type,
        notices=notices,
    )
