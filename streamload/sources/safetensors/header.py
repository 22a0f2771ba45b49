"""The safetensors header, read strictly: no torch, no numpy, nothing but the header's bytes.

Format: 8 bytes little-endian length N, N bytes of JSON, then the data
(https://github.com/huggingface/safetensors, "Format"). At least as strict as the reference
reader: no overlap, no hole, no bytes left over, and no name twice.
"""

from __future__ import annotations

from typing import Any

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import CheckpointError, naming
from streamload.core.specs import Catalog, Extent, TensorSpec
from streamload.sources.files import ReadableFile
from streamload.sources.recognise import SNIFFED_BYTES, describe_start
from streamload.sources.small_files import loads_strictly
from streamload.system.gc_pause import without_collections

# The reference implementation's limit; a legal header above it is named as such.
MAX_HEADER_BYTES = 100_000_000
_U64 = 1 << 64
# What torch can address, and what the reference's JSON reader nests and holds as a number.
_I64 = 1 << 63
_MAX_DEPTH = 124
_MAX_NUMBER = 1.7976931348623157e308
_MAX_NAME_CHARS = 16_384
_ENTRY_BYTES = 64  # about what one tensor takes in a header


def read_header(file: ReadableFile) -> Catalog:
    """The catalog of one safetensors file, in file order.

    Raises:
        CheckpointError: the file is not a whole, consistent safetensors file; ``.problems`` has
            one line for each tensor at fault.
    """
    with naming(file.path):
        text = _header_text(file)
        with without_collections(len(text) // _ENTRY_BYTES):
            return _read_text(file, text, 8 + len(text))


def _read_text(file: ReadableFile, text: bytes, data_start: int) -> Catalog:
    try:
        header = loads_strictly(text)
    except ValueError as error:
        raise CheckpointError(f"the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"the header is a JSON {type(header).__name__}, expected an object")
    metadata = _metadata(header.pop("__metadata__", None))
    specs = {
        name: TensorSpec(
            name, dtype, shape, file.path, Extent(file.path, data_start + begin, end - begin)
        )
        for begin, end, name, dtype, shape in _entries(header, file, data_start)
    }
    return Catalog(specs, metadata)


def _header_text(file: ReadableFile) -> bytes:
    size = file.size_bytes
    if size == 0:
        raise CheckpointError("the file is empty (0 bytes)")
    mishap = describe_start(file.read(0, min(size, SNIFFED_BYTES)))
    if mishap:
        raise CheckpointError(f"not a safetensors file: it {mishap}")
    if size < 8:
        raise CheckpointError(
            f"cut short: {size} bytes, expected at least 8 for the header's length"
        )
    length = int.from_bytes(file.read(0, 8), "little")
    if length > size - 8:
        raise CheckpointError(
            f"the header says it is {length} bytes long, but the file has {size} bytes in all: "
            "cut short, or not a safetensors file"
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header is {length} bytes long, over the format's limit of {MAX_HEADER_BYTES}"
        )
    if length == 0:
        raise CheckpointError("the header is 0 bytes long, expected JSON")
    text = file.read(8, length)
    if text[:1] != b"{":
        raise CheckpointError(
            f"the header starts with {text[:1]!r}, expected '{{': not a safetensors file"
        )
    return text


def _metadata(value: object) -> dict[str, str]:
    if value is None:  # also `null`: some writers have it where there is no metadata
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"__metadata__ is a JSON {type(value).__name__}, expected an object")
    for key, entry in value.items():
        if not isinstance(entry, str) or not is_encodable(key + entry):
            raise CheckpointError(f"__metadata__ entry {key!r} is {entry!r}, expected a string")
    return value


_Entry = tuple[int, int, str, str, tuple[int, ...]]


def _entries(header: dict[str, Any], file: ReadableFile, data_start: int) -> list[_Entry]:
    data_bytes = file.size_bytes - data_start
    entries: list[_Entry] = []
    problems: list[tuple[str, str]] = []
    for name, info in header.items():
        fault = _entry_fault(name, info, data_bytes)
        if fault:
            problems.append((name, fault))
        else:
            begin, end = info["data_offsets"]
            entries.append((begin, end, name, info["dtype"], tuple(info["shape"])))
    _refuse(problems)
    entries.sort(key=lambda entry: entry[:2])
    position, before = 0, ""
    for begin, end, name, _, _ in entries:
        if begin != position:
            what = "overlaps" if begin < position else "leaves a hole after"
            where = f"{what} {before or 'the header'!r}, expected byte {position}"
            problems.append((name, f"starts at byte {begin} and {where}"))
        position, before = max(position, end), name
    _refuse(problems)
    if position != data_bytes:
        raise CheckpointError(
            f"{data_bytes - position} bytes are left over after the last tensor: expected "
            f"{data_start + position} bytes, found {file.size_bytes}"
        )
    return entries


def _entry_fault(name: str, info: Any, data_bytes: int) -> str | None:
    """What is wrong with one entry by itself, or None."""
    if len(name) > _MAX_NAME_CHARS:
        return f"the name has {len(name)} characters; the limit is {_MAX_NAME_CHARS}"
    if not name.isascii() and not is_encodable(name):
        return "the name is not valid Unicode"
    if type(info) is not dict:
        return f"the entry is {_shown(info)}, expected an object"
    if len(info) > 3 and not _is_plain(info, _MAX_DEPTH):
        return "the entry holds a value that is not plain JSON"
    dtype_name, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if type(dtype_name) is not str:
        return f"dtype is {_shown(dtype_name)}, expected a string"
    dtype = BY_NAME.get(dtype_name)
    if dtype is None:
        return f"unknown dtype {dtype_name!r}"
    if type(shape) is not list:
        return f"shape is {_shown(shape)}, expected a list"
    bits, reach = dtype.bits, 1
    for size in shape:
        if type(size) is not int or not 0 <= size < _U64:
            return f"shape {_shown(shape)} is not a list of sizes"
        bits *= size
        reach *= max(size, 1)
        if bits >= _U64 * 8 or reach >= _I64:
            return f"shape {_shown(shape)} has more elements than there can be"
    if type(offsets) is not list or len(offsets) != 2:
        return f"data_offsets is {_shown(offsets)}, expected two numbers"
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < _U64:
        return f"data_offsets {_shown(offsets)} is not a range of bytes"
    if bits != (end - begin) * 8:
        return (
            f"{dtype_name} {shape!r} needs {bits / 8:g} bytes, data_offsets {offsets!r} "
            f"has {end - begin}"
        )
    if end > data_bytes:
        return f"ends at byte {end} of the data, but only {data_bytes} bytes are there: cut short"
    return None


def _is_plain(value: object, depth: int) -> bool:
    """True for what every JSON reader takes: Unicode text, numbers of 64-bit floats, not deep.

    Fields beyond the format's three are left out, but a file that only we could read is none.
    """
    if depth == 0:
        return False
    if isinstance(value, dict):
        return all(is_encodable(k) and _is_plain(v, depth - 1) for k, v in value.items())
    if isinstance(value, list):
        return all(_is_plain(part, depth - 1) for part in value)
    if isinstance(value, str):
        return is_encodable(value)
    return not isinstance(value, int | float) or -_MAX_NUMBER <= value <= _MAX_NUMBER


def _shown(value: object) -> str:
    """A value for a message: short, whatever the file holds."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def is_encodable(name: str) -> bool:
    """False for text with lone surrogates, which UTF-8 does not have."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse(problems: list[tuple[str, str]]) -> None:
    if not problems:
        return
    name, fault = problems[0]
    more = f" (and {len(problems) - 1} more tensors at fault)" if len(problems) > 1 else ""
    others = "".join(f"; {n!r}" for n, _ in problems[1:4])
    raise CheckpointError(
        fault + more + others,
        tensor=name,
        problems=tuple(f"tensor {n!r}: {f}" for n, f in problems),
    )
