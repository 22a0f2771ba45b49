"""The GGUF header, read strictly: no torch, no numpy, no ``gguf`` package.

Format: ``GGUF``, version, counts of tensors and of key-value pairs, the pairs, what is known of
each tensor, and, aligned, the data (https://github.com/ggml-org/ggml, docs/gguf.md). As strict as
ggml's own reader: tensors lie one after the other, each at the next aligned byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamload.core.errors import CheckpointError, naming, refuse
from streamload.core.specs import Extent, Shape, numel
from streamload.sources.files import ReadableFile
from streamload.sources.gguf.block_types import BlockType, block_type
from streamload.sources.gguf.metadata_values import ALIGNMENT_KEY, HeaderBytes, Value
from streamload.system.gc_pause import without_collections

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_QUANTIZATION_VERSION = 2
_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 30
_MAX_DIMENSIONS = 4
_MAX_TENSORS = 200_000
# What a pair and what a tensor's description take at least.
_PAIR_BYTES, _TENSOR_BYTES = 14, 25
_I64 = 1 << 63


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: its name in the file, its type, its shape (rows last) and where it lies."""

    name: str
    type: BlockType
    shape: Shape
    extent: Extent


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Attributes:
        metadata: its pairs, in order.
        tensors: its tensors by name, in order.
        spare_bytes: how many bytes follow the last tensor and its padding.
    """

    path: str
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]
    spare_bytes: int = 0


def read_header(file: ReadableFile) -> Header:
    """Everything before the data.

    Raises:
        CheckpointError: the file is not a whole, consistent GGUF file; ``.problems`` has one line
            for each tensor at fault.
    """
    with naming(file.path):
        data = HeaderBytes(file)
        tensor_count, pair_count = _counts(data)
        with without_collections(tensor_count + pair_count):
            metadata = _pairs(data, pair_count)
            return _with_tensors(file, data, metadata, tensor_count)


def _counts(data: HeaderBytes) -> tuple[int, int]:
    magic = data.take(min(4, data.left), "the format's mark")
    if magic != MAGIC:
        raise CheckpointError(f"starts with {magic!r}, expected {MAGIC!r}: not a GGUF file")
    version = data.u32("the version")
    if version and version % (1 << 16) == 0:
        raise CheckpointError("is written for big-endian machines, which is not read")
    if version not in _VERSIONS:
        raise CheckpointError(f"is of GGUF version {version}, expected 2 or 3")
    tensors = data.u64("the number of tensors")
    pairs = data.u64("the number of key-value pairs")
    for count, least, what in (
        (tensors, _TENSOR_BYTES, "tensors"),
        (pairs, _PAIR_BYTES, "key-value pairs"),
    ):
        if count > data.left // least:
            raise CheckpointError(
                f"cut short: the header has {count} {what}, which need {least} bytes each at "
                f"least, but only {data.left} bytes are left"
            )
    if tensors > _MAX_TENSORS:
        raise CheckpointError(f"the header has {tensors} tensors; the limit is {_MAX_TENSORS}")
    return tensors, pairs


def _pairs(data: HeaderBytes, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = data.key()
        if key in metadata:
            raise CheckpointError(f"duplicate key {key!r}")
        metadata[key] = data.value(key)
    return metadata


def _with_tensors(
    file: ReadableFile, data: HeaderBytes, metadata: dict[str, Value], count: int
) -> Header:
    alignment = _alignment(metadata)
    infos = [_info(data) for _ in range(count)]
    start = -(-data.position // alignment) * alignment
    expected, seen = 0, set()
    problems: list[tuple[str, str]] = []
    tensors: dict[str, StoredTensor] = {}
    end = data.position
    for name, dims, number, offset in infos:
        made = _tensor(file, name, dims, number, start + offset)
        fault = made if isinstance(made, str) else ""
        if name in seen:
            fault = "is in the header twice"
        elif not fault and not isinstance(made, str):
            end = made.extent.offset + made.extent.nbytes
            if offset != expected:
                fault = f"starts at byte {offset} of the data, expected byte {expected}"
            elif end > file.size_bytes:
                fault = f"ends at byte {end}, but the file has {file.size_bytes} bytes: cut short"
            tensors[name] = made
            expected = -(-(offset + made.extent.nbytes) // alignment) * alignment
        seen.add(name)
        if fault:
            problems.append((name, fault))
    if len(problems) == 1:
        raise CheckpointError(problems[0][1], path=file.path, tensor=problems[0][0])
    refuse((f"tensor {name!r}: {fault}" for name, fault in problems), path=file.path)
    _check_quantization(metadata, tensors)
    spare = file.size_bytes - max(end, min(start + expected, file.size_bytes))
    return Header(file.path, metadata, tensors, spare)


def _alignment(metadata: Mapping[str, Value]) -> int:
    found = metadata.get(ALIGNMENT_KEY, _ALIGNMENT)
    assert isinstance(found, int), "its type is checked where it is read"
    if not 8 <= found <= _MAX_ALIGNMENT or found & (found - 1):
        raise CheckpointError(f"{ALIGNMENT_KEY} is {found}, expected a power of two of at least 8")
    return found


def _info(data: HeaderBytes) -> tuple[str, Shape, int, int]:
    name = data.name()
    what = f"tensor {name!r}"
    count = data.u32(what)
    if count > _MAX_DIMENSIONS:
        raise CheckpointError(
            f"has {count} dimensions; the limit is {_MAX_DIMENSIONS}", tensor=name
        )
    dims = tuple(data.u64(what) for _ in range(count))
    return name, dims, data.u32(what), data.u64(what)


def _tensor(
    file: ReadableFile, name: str, dims: Shape, number: int, offset: int
) -> StoredTensor | str:
    """The tensor, or what is wrong with it by itself."""
    kind = block_type(number)
    if isinstance(kind, str):
        return kind
    shape = dims[::-1]
    reach = numel(tuple(max(size, 1) for size in shape))
    if reach >= _I64 // 8:
        return f"shape {list(shape)} has more elements than there can be"
    width = shape[-1] if shape else 1
    if width % kind.elements:
        return (
            f"rows of {width} elements are not whole blocks of {kind.elements}, which "
            f"{kind.name} has"
        )
    if offset >= _I64:
        return f"starts at byte {offset}, which no file has"
    nbytes = numel(shape) // kind.elements * kind.nbytes
    return StoredTensor(name, kind, shape, Extent(file.path, offset, nbytes))


def _check_quantization(metadata: Mapping[str, Value], tensors: Mapping[str, StoredTensor]) -> None:
    version = metadata.get("general.quantization_version", _QUANTIZATION_VERSION)
    if version == _QUANTIZATION_VERSION or all(t.type.plain for t in tensors.values()):
        return
    raise CheckpointError(
        f"general.quantization_version is {_shown(version)}, expected {_QUANTIZATION_VERSION}: "
        "its blocks are of another layout"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
