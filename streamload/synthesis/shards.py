"""Which tensor goes into which safetensors file at which offset, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from streamload.core.dtypes import BY_TORCH_NAME
from streamload.synthesis.recipes import Recipe

__all__ = ["INDEX_NAME", "Shard", "index_json", "plan_shards"]

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its name, its header (length prefix included), its tensors in file order."""

    file: str
    header: bytes
    recipes: tuple[Recipe, ...]
    nbytes: int


def plan_shards(
    recipes: Iterable[Recipe], *, dtype: str, max_shard_bytes: int | None
) -> tuple[Shard, ...]:
    """Cut the tensors into files of at most ``max_shard_bytes`` of data (or one tensor)."""
    groups: list[list[Recipe]] = [[]]
    size = 0
    for recipe in recipes:
        nbytes = recipe.nbytes(dtype)
        if groups[-1] and max_shard_bytes is not None and size + nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(recipe)
        size += nbytes
    count = len(groups)
    return tuple(
        _shard(_file_name(i, count), tuple(group), dtype) for i, group in enumerate(groups, 1)
    )


def index_json(shards: tuple[Shard, ...], *, dtype: str) -> bytes:
    """The index file's content."""
    total = sum(recipe.nbytes(dtype) for shard in shards for recipe in shard.recipes)
    where = {recipe.name: shard.file for shard in shards for recipe in shard.recipes}
    content = {"metadata": {"total_size": total}, "weight_map": where}
    return json.dumps(content, indent=2).encode() + b"\n"


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _shard(file: str, recipes: tuple[Recipe, ...], dtype: str) -> Shard:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for recipe in recipes:
        start, end = end, end + recipe.nbytes(dtype)
        entries[recipe.name] = {
            "dtype": BY_TORCH_NAME[recipe.dtype or dtype].name,
            "shape": list(recipe.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format's own writer aligns the data to 8 bytes
    header = len(text).to_bytes(8, "little") + text
    return Shard(file, header, recipes, len(header) + end)
