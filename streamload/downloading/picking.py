"""Which files of a repository are fetched: one set of weights and what a load needs beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

__all__ = ["INDEXES", "pick_files"]

# Best first; of each kind an index goes before a single file.
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_BESIDE = frozenset(
    (
        "config.json",
        "generation_config.json",
        "params.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "20B_tokenizer.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
        "chat_template.jinja",
        "chat_template.json",
    )
)
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<ending>\.\w+)")
# Weights of something else than the model, or a second copy of them.
_NOT_WEIGHTS = ("adapter_", "optimizer", "training_args", "scheduler", "rng_state", "flax_", "tf_")


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
    beside = [name for name in top if name in _BESIDE]
    return (*beside, *weights) if weights else ()


def _weights(names: Sequence[str], shards_of: Callable[[str], Collection[str]]) -> list[str]:
    for index, endings in zip(INDEXES, ((".safetensors",), (".bin", ".pt", ".pth")), strict=True):
        if index in names:
            return [index, *sorted(set(shards_of(index)))]
        kind = [n for n in names if n.endswith(endings) and not n.startswith(_NOT_WEIGHTS)]
        found = _one_set([n for n in kind if not n.startswith("consolidated")])
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
    parts = [n for n in names if _PART.fullmatch(n)]
    if not parts:
        return list(names) if len(names) == 1 else []
    first = _PART.fullmatch(parts[0])
    assert first is not None, "parts are those that match"
    return [n for n in parts if (m := _PART.fullmatch(n)) and m["stem"] == first["stem"]]
