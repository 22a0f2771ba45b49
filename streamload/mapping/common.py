"""What every table shares: buffers that old writers stored and no model loads."""

from __future__ import annotations

import re

from streamload.mapping.rules import KNOWN_WRAPPERS, NameMap, Rule
from streamload.mapping.templates import NUMBER

# Matched only where the module itself has no such name.
KNOWN_BUFFERS = NameMap(
    (
        Rule("h.{layer}.attn.bias", ndim=4),
        Rule("h.{layer}.attn.masked_bias", ndim=0),
        Rule("layers.{layer}.self_attn.rotary_emb.inv_freq", ndim=1),
        Rule("layers.{layer}.attention.bias", ndim=4),
        Rule("layers.{layer}.attention.masked_bias", ndim=0),
        Rule("layers.{layer}.attention.rotary_emb.inv_freq", ndim=1),
        Rule("rope.freqs", ndim=1),
    ),
    wrappers=(*KNOWN_WRAPPERS, "gpt_neox"),
)

# GPT-NeoX's head: files have the older name, the newer classes of transformers the other.
KNOWN_RENAMES = {"embed_out.weight": "lm_head.weight", "lm_head.weight": "embed_out.weight"}


def layer_of(name: str) -> int | None:
    """The block index in a name: its first part that is a number."""
    found = _LAYER.search(name)
    return int(found[0]) if found else None


_LAYER = re.compile(rf"(?<![^.]){NUMBER.pattern}(?![^.])")
