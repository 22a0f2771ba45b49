"""The layout of new safetensors files: which tensor is where, headers, shards, index. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamload.planning.records import PlannedTensor
from streamload.sources.safetensors.header import MAX_HEADER_BYTES

__all__ = ["NewFile", "index_text", "lay_out"]


@dataclass(frozen=True, slots=True)
class NewFile:
    """One file to be written.

    Attributes:
        name: in its folder.
        header: the length and the JSON, ready to be written.
        offsets: tensor name → where its bytes begin in the file.
        nbytes: of the whole file.
    """

    name: str
    header: bytes
    offsets: Mapping[str, int]
    nbytes: int


def lay_out(
    tensors: Sequence[PlannedTensor],
    name: str,
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    token: str = "",
) -> list[NewFile]:
    """One file called ``name``, or shards ``STEM[-TOKEN]-00001-of-0000N`` under the bound.

    Args:
        tensors: in the order they are written; names must be unique.
        name: the file's name if there is but one.
        max_shard_bytes: of tensor data in a file; a larger tensor has a file of its own.
        metadata: the header's string-to-string map.
        token: sets the shards' names apart from those of an older set in the same folder.

    Raises:
        ValueError: a header would be over the format's limit.
    """
    shards: list[list[PlannedTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if max_shard_bytes is not None and shards[-1] and held + tensor.nbytes > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.nbytes
    if len(shards) == 1:
        return [_file(name, shards[0], metadata)]
    stem, _, ending = name.rpartition(".")
    stem = f"{stem}-{token}" if token else stem
    return [
        _file(f"{stem}-{i:05d}-of-{len(shards):05d}.{ending}", shard, metadata)
        for i, shard in enumerate(shards, 1)
    ]


def _file(
    name: str, tensors: Sequence[PlannedTensor], metadata: Mapping[str, str] | None
) -> NewFile:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    # Wider elements first, as the reference writer does: every tensor stays aligned.
    position = 0
    starts: dict[str, int] = {}
    for tensor in _aligned(tensors):
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        starts[tensor.name] = position
        position += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % 64)  # the data begins at a multiple of 64
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header of {name} would be {len(text)} bytes long")
    header = len(text).to_bytes(8, "little") + text
    offsets = {tensor: len(header) + start for tensor, start in starts.items()}
    return NewFile(name, header, offsets, len(header) + position)


def _aligned(tensors: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """In the given order, but never a wider element behind an odd number of bytes."""
    from streamload.core.dtypes import BY_NAME

    sizes = {BY_NAME[t.dtype].itemsize for t in tensors}
    if len(sizes) < 2:
        return list(tensors)
    return sorted(tensors, key=lambda t: -BY_NAME[t.dtype].itemsize)


def index_text(files: Sequence[NewFile], total_bytes: int) -> bytes:
    """``model.safetensors.index.json`` for a set of shards."""
    weight_map = {tensor: file.name for file in files for tensor in file.offsets}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
