"""The layout of new safetensors files: which tensor is where, headers, shards, index. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamload.core.dtypes import BY_NAME
from streamload.core.specs import TensorSpec
from streamload.planning.records import Plan, PlannedTensor
from streamload.sources.safetensors.header import MAX_HEADER_BYTES

# The header's key for its map of strings.
_RESERVED = "__metadata__"
_Tensors = Sequence[PlannedTensor | TensorSpec]


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
    tensors: _Tensors,
    name: str,
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    token: str = "",
    aligned: bool = True,
) -> list[NewFile]:
    """One file called ``name``, or shards ``STEM[-TOKEN]-00001-of-0000N`` under the bound.

    Args:
        tensors: in the order they are written; names must be unique.
        name: the file's name if there is but one.
        max_shard_bytes: of tensor data in a file; a larger tensor has a file of its own.
        metadata: the header's string-to-string map.
        token: sets the shards' names apart from those of an older set in the same folder.
        aligned: data begins at a multiple of 64, and wider elements go first, so that every
            tensor can be mapped; else of 8, in the given order, as many published files are.

    Raises:
        ValueError: a header would be over the format's limit.
    """
    shards: list[list[PlannedTensor | TensorSpec]] = [[]]
    held = 0
    for tensor in tensors:
        if max_shard_bytes is not None and shards[-1] and held + tensor.nbytes > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.nbytes
    if aligned:  # a stable sort, as the reference writer does
        shards = [sorted(s, key=lambda t: -BY_NAME[t.dtype].itemsize) for s in shards]
    names = [name]
    if len(shards) > 1:
        stem, _, ending = name.rpartition(".")
        stem = f"{stem}-{token}" if token else stem
        names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.{ending}" for i in range(len(shards))]
    multiple = 64 if aligned else 8
    return [_file(n, s, metadata or {}, multiple) for n, s in zip(names, shards, strict=True)]


def _file(name: str, tensors: _Tensors, metadata: Mapping[str, str], multiple: int) -> NewFile:
    entries: dict[str, object] = {_RESERVED: {"format": "pt", **metadata}}
    position = 0
    starts: dict[str, int] = {}
    for tensor in tensors:
        starts[tensor.name] = position
        position += tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [starts[tensor.name], position],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % multiple)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header of {name} would be {len(text)} bytes long")
    header = len(text).to_bytes(8, "little") + text
    offsets = {tensor: len(header) + start for tensor, start in starts.items()}
    return NewFile(name, header, offsets, len(header) + position)


def index_text(files: Sequence[NewFile]) -> bytes:
    """``model.safetensors.index.json`` for a set of shards."""
    weight_map = {tensor: file.name for file in files for tensor in file.offsets}
    total_bytes = sum(file.nbytes - len(file.header) for file in files)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def only_writable(plan: Plan) -> Plan:
    """The plan, refused if safetensors cannot hold one of its tensors."""
    problems = []
    for tensor in plan.tensors:
        why = name_fault(tensor.name)
        if tensor.dtype == "C128":  # torch has it; the format's reference reader does not
            why = f"safetensors has no type for {BY_NAME[tensor.dtype].torch_name}"
        if why:
            problems.append(f"{tensor.name!r} cannot be written: {why}")
    return plan.refused(*problems)


def name_fault(name: str) -> str:
    """Why no tensor in a safetensors file can have this name, or nothing."""
    if name == _RESERVED:
        return "safetensors reserves that name for the header's metadata"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not valid Unicode (it has a lone surrogate)"
    return ""
