"""``.metadata`` files of torch.distributed.checkpoint that are small and stand for much."""

from __future__ import annotations

import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = [
    "metadata_of_long_names",
    "metadata_of_many_pieces",
    "metadata_of_nothing_but_tables",
    "metadata_of_one_list_of_pieces",
    "metadata_of_one_place",
]

_PROPERTIES = TensorProperties(dtype=torch.float32)


def _box(*spans: tuple[int, int]) -> ChunkStorageMetadata:
    starts, sizes = zip(*spans, strict=True)
    return ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes))


def _saved(tensors: dict[str, TensorStorageMetadata], stored: object = None) -> bytes:
    names = {name: (name,) for name in tensors}
    return pickle.dumps(Metadata(tensors, names, stored or {}, None, "1.0.0"))


def metadata_of_one_list_of_pieces() -> bytes:
    """A list of a thousand pieces, which twenty thousand tensors have."""
    pieces = [_box((n, 1)) for n in range(1000)]
    tensor = TensorStorageMetadata(_PROPERTIES, torch.Size((1000,)), pieces)
    return _saved({f"t{n}": tensor for n in range(20_000)})


def metadata_of_many_pieces() -> bytes:
    """Pieces that are no grid, all of them across each other."""
    pieces = [_box((n, 1), (n % 2, 9_000 - n)) for n in range(9_000)]
    pieces += [_box((0, 9_000), (n, 1)) for n in range(4_000)]
    return _saved({"t": TensorStorageMetadata(_PROPERTIES, torch.Size((9_000, 9_000)), pieces)})


def metadata_of_one_place() -> bytes:
    """Ten thousand tensors that are stored at one and the same place."""
    tensor = TensorStorageMetadata(_PROPERTIES, torch.Size((1,)), [_box((0, 1))])
    place = _StorageInfo("__0_0.distcp", 0, 1261)
    names = [f"t{n}" for n in range(10_000)]
    stored = {MetadataIndex(name, torch.Size((0,))): place for name in names}
    return _saved(dict.fromkeys(names, tensor), stored)


def metadata_of_long_names() -> bytes:
    """Names of files, and ways to a name, that are long and stand in many places."""
    long, keys = "f" * 1_000_000, tuple("k" * 16_000 for _ in range(1000))
    stored = {
        MetadataIndex(f"t{n}", torch.Size((0,))): _StorageInfo(long, 0, 1) for n in range(10_000)
    }
    tensor = TensorStorageMetadata(_PROPERTIES, torch.Size((1,)), [_box((0, 1))])
    names = {f"t{n}": keys for n in range(10_000)}
    return pickle.dumps(Metadata(dict.fromkeys(names, tensor), names, stored, None, "1.0.0"))


def metadata_of_nothing_but_tables() -> bytes:
    return b"\x80\x04(" + b"}" * 8_000_000 + b"t."
