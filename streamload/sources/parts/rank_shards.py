"""Safetensors that each rank of a run wrote of its own pieces, as torch's HuggingFaceStorageWriter.

``shard-{rank}-model-{file}-of-{files}.safetensors``; the header's metadata says under
``DCP_SHARDING_INFO`` where each tensor of the file begins in the whole one
(torch/distributed/checkpoint/_hf_utils.py). No file says how large the whole is, or how many ranks
there were.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from streamload.core.errors import CheckpointError, naming, refuse
from streamload.core.pieces import Box, tiling_fault
from streamload.core.specs import Catalog, Shape, TensorSpec, contiguous_strides
from streamload.core.wording import plural
from streamload.sources.block_source import read_each
from streamload.sources.files import ReadableFile
from streamload.sources.parts.assembled import Assembled, AssembledSource, assemble
from streamload.sources.safetensors.header import read_header
from streamload.sources.small_files import loads_strictly
from streamload.sources.torch.stored_tensors import StoredTensor

_SHARD = re.compile(r"shard-(?P<rank>\d{5})-model-\d{5}-of-\d{5}\.safetensors")
_OFFSETS_KEY = "DCP_SHARDING_INFO"


def are_rank_shards(names: Sequence[str]) -> bool:
    """True for files that are by their names what ranks wrote of their own pieces."""
    return all(map(_SHARD.fullmatch, names))


def open_rank_shards(paths: Sequence[str], *, given: str) -> AssembledSource:
    """Open all shards as one checkpoint; only headers are read.

    Raises:
        CheckpointError: a shard is absent or damaged, does not say where its tensors belong, or
            the pieces do not make their tensors. All problems are listed.
    """
    with naming(given), ExitStack() as opened:
        ranks = {int(match["rank"]) for path in paths if (match := _SHARD.search(path))}
        absent = sorted({*range(1, max(ranks) + 1)} - ranks)
        refuse(f"shard-{rank:05d}-* is absent" for rank in absent)
        headers = read_each(paths, lambda file: (file, read_header(file)), opened, given=given)
        tensors = _tensors(headers)
        notice = (
            f"pieces of {plural(len(ranks), 'rank')}, and no file says how large the "
            "tensors are: what a rank beyond these may have written is not missed"
        )
        source = AssembledSource(given, [file for file, _ in headers], tensors, (notice,))
        opened.pop_all()
    return source


def _tensors(headers: Sequence[tuple[ReadableFile, Catalog]]) -> dict[str, Assembled]:
    pieces: dict[str, dict[Box, list[TensorSpec]]] = {}
    for file, catalog in headers:
        with naming(file.path):
            for name, box in _boxes(catalog):
                pieces.setdefault(name, {}).setdefault(box, []).append(catalog[name])
    found: dict[str, Assembled] = {}
    problems: list[str] = []
    for name, boxes in pieces.items():
        ends = [[at + n for at, n in zip(b.offsets, b.sizes, strict=True)] for b in boxes]
        dtypes = list(dict.fromkeys(spec.dtype for specs in boxes.values() for spec in specs))
        kinds = {len(end) for end in ends}
        shape: Shape = tuple(map(max, zip(*ends, strict=True))) if len(kinds) == 1 else ()
        fault = f"its pieces are of {' and '.join(dtypes)}" if len(dtypes) > 1 else ""
        if fault := fault or tiling_fault(shape, list(boxes)):
            problems.append(f"tensor {name!r}: {fault}")
            continue
        filled = {b: _stored(specs) for b, specs in boxes.items() if 0 not in b.sizes or 0 in shape}
        found[name] = assemble(name, dtypes[0], shape, filled)
    refuse(problems)
    return found


def _boxes(catalog: Catalog) -> Iterator[tuple[str, Box]]:
    """Where each tensor of one file is in the whole one."""
    offsets = _offsets(catalog)
    for name, spec in catalog.items():
        info = offsets.get(name)
        begin = info.get("saved_offsets") if isinstance(info, dict) else None
        if not isinstance(begin, list) or len(begin) != len(spec.shape):
            raise CheckpointError(f"{_OFFSETS_KEY} says {info!r} of it"[:200], tensor=name)
        if not all(type(at) is int and 0 <= at < 1 << 62 for at in begin):
            raise CheckpointError(f"{_OFFSETS_KEY} has it begin at {begin!r}"[:200], tensor=name)
        yield name, Box(tuple(begin), spec.shape)


def _offsets(catalog: Catalog) -> Mapping[str, Any]:
    text = catalog.metadata.get(_OFFSETS_KEY)
    if text is None:
        raise CheckpointError(
            f"its header has no {_OFFSETS_KEY}, which says where in the tensors its pieces belong"
        )
    try:
        found = loads_strictly(text.encode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise CheckpointError(f"{_OFFSETS_KEY} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{_OFFSETS_KEY} is no JSON object")
    return found


def _stored(copies: Sequence[TensorSpec]) -> list[StoredTensor]:
    found = []
    for spec in copies:
        assert spec.extent is not None, "each tensor of such a file has one"
        found.append(StoredTensor(spec, spec.extent, contiguous_strides(spec.shape)))
    return found
