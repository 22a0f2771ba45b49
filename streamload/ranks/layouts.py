"""How ``--shard`` lays a model out over ranks: which dimension of which tensor is cut. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from streamload.core.specs import Shape
from streamload.ranks.shards import Cut, Shard, shard_of

LAYOUTS = ("fsdp", "tp")

# Last names of linear layers, of the models here and of transformers'. Cut by what comes out:
_COLUMNS = frozenset(
    {
        "q",
        "k",
        "v",
        "up",
        "gate",
        "fc1",
        "tok_embed",
        "lm_head",
        "q_proj",
        "k_proj",
        "v_proj",
        "up_proj",
        "gate_proj",
        "query_key_value",
        "dense_h_to_4h",
        "embed_tokens",
        "embed_in",
        "embed_out",
    }
)
# By what goes in, so that their sums are added up over the ranks:
_ROWS = frozenset({"out_proj", "down", "fc2", "o_proj", "down_proj", "dense_4h_to_h"})
# By what comes out, each of the layers that were put into one:
_FUSED: Mapping[str, int] = {"qkv": 3, "gate_up_proj": 2}


def cut_of(how: str, name: str, shape: Shape, *, by_head: bool = False) -> tuple[int, int] | None:
    """Which dimension of a parameter is cut, and into how many groups first; None if none is.

    Args:
        how: ``"fsdp"`` cuts every parameter by its first dimension; ``"tp"`` is tensor
            parallelism: attention and feed-forward by columns and rows, vocabularies by rows.
        name: the parameter's, with its module's path.
        shape: of the whole parameter.
        by_head: fused layers lie head by head, so that they are cut as one.
    """
    if not shape:
        return None
    if how == "fsdp":
        return 0, 1
    *path, last = name.split(".")
    # A stacked expert is a parameter of its own, where others are ``weight`` and ``bias``.
    layer = path[-1] if last in ("weight", "bias") and path else last
    is_bias = last == "bias"
    rows = 0 if is_bias else max(len(shape) - 2, 0)
    if layer in _FUSED:
        return rows, 1 if by_head else _FUSED[layer]
    if layer in _COLUMNS:
        return rows, 1
    if layer in _ROWS and not is_bias:
        return len(shape) - 1, 1
    return None


def part_for(
    how: str, name: str, shape: Shape, rank: int, ranks: int, *, by_head: bool = False
) -> Shard:
    """What one of ``ranks`` holds of a parameter."""
    found = cut_of(how, name, shape, by_head=by_head)
    cuts = () if found is None else (Cut(found[0], ranks, rank, found[1]),)
    return shard_of(shape, cuts)
