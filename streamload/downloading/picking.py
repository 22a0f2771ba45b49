"""Which files of a repository are fetched: one set of weights and what a load needs beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from streamload.sources.config.companions import is_companion
from streamload.sources.folders import INDEXES, NOT_WEIGHTS, PART_OF, TORCH_ENDINGS

_BESIDE = ("config.json", "params.json")
# Weights of something else than the model, or a second copy of them.
_NOT_FIRST = (*NOT_WEIGHTS, "consolidated", "flax_", "tf_")


def pick_files(
    names: Collection[str], shards_of: Callable[[str], Collection[str]]
) -> tuple[str, ...]:
    """The files to fetch, of a repository's top folder.

    Safetensors go before ``.bin``, an index before single files, and ``consolidated*`` (Meta's
    and Mistral's own names) are taken only where there is nothing else. Nothing is taken twice.

    Args:
        names: all files.
        shards_of: the shards an index names.

    Returns:
        Weights last; empty if there are none of a kind that can be read.
    """
    top = sorted(name for name in names if "/" not in name)
    weights = _weights(top, shards_of)
    beside = [name for name in sorted(names) if name in _BESIDE or is_companion(name)]
    return (*beside, *weights) if weights else ()


def _weights(names: Sequence[str], shards_of: Callable[[str], Collection[str]]) -> list[str]:
    for index, endings in zip(INDEXES, ((".safetensors",), TORCH_ENDINGS), strict=True):
        if index in names:
            return [index, *sorted(set(shards_of(index)))]
        kind = [n for n in names if n.endswith(endings)]
        found = _one_set([n for n in kind if not n.startswith(_NOT_FIRST)])
        if found:
            return found
    for ending in (".safetensors", ".pth"):
        kind = [n for n in names if n.startswith("consolidated") and n.endswith(ending)]
        if kind:
            return kind
    return []


def _one_set(names: Sequence[str]) -> list[str]:
    """One file, or all parts of one set that has no index."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if name in names:
            return [name]
    parts = [m for n in names if (m := PART_OF.fullmatch(n))]
    if parts:
        return [m.string for m in parts if m["stem"] == parts[0]["stem"]]
    return list(names) if len(names) == 1 else []
