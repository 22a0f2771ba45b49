"""From a pickled tensor record to bytes of a file: extents, strides, and the values themselves."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streamload.core.dtypes import BY_NAME, BY_TORCH_NAME
from streamload.core.errors import CheckpointError
from streamload.core.specs import Extent, Shape, TensorSpec, contiguous_strides, is_dense, numel
from streamload.sources.torch.pickle_records import StorageRef, TensorRef, shown
from streamload.sources.torch.zip_archive import inflated

if TYPE_CHECKING:
    import torch

    from streamload.sources.files import ReadableFile


@dataclass(frozen=True, slots=True)
class Region:
    """Where the bytes of one storage are in its file.

    ``checksum`` is their CRC-32 as the writer noted it; 0 if it did not. ``deflated_nbytes``: the
    bytes they take in the file, if they are compressed.
    """

    offset: int
    nbytes: int
    checksum: int = 0
    deflated_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's spec and how its values come out of the storage.

    Attributes:
        spec: as listed in the catalog.
        span: the storage's bytes from the first to the last element, holes included.
        strides: in elements, within the span.
        conj, neg: the values are the conjugate, or the negative, of the stored ones.
        swapped: the bytes of each element are in big-endian order.
        deflated: the storage, if it is compressed; the span then counts from its first byte.
    """

    spec: TensorSpec
    span: Extent
    strides: Shape
    conj: bool = False
    neg: bool = False
    swapped: bool = False
    deflated: Region | None = None

    def renamed(self, name: str) -> StoredTensor:
        """The same tensor, listed under another name."""
        return replace(self, spec=replace(self.spec, name=name))


def place(
    name: str,
    record: TensorRef,
    regions: Mapping[str, Region],
    *,
    path: str,
    big_endian: bool = False,
) -> StoredTensor:
    """Where tensor ``name`` lies in the file at ``path``.

    ``regions`` has the storages by key. Tensors that are dense in memory get an extent that can
    be read in blocks; others (expanded, sliced with steps, conjugated) only a span.

    Raises:
        CheckpointError: the storage is absent, or the tensor reaches out of it.
    """
    region = regions.get(record.storage.key)
    dtype = BY_TORCH_NAME[record.dtype]
    check_storage(record.storage, region, tensor=name)
    assert region is not None
    count = numel(record.shape)
    if count * dtype.itemsize >= 1 << 63:
        raise CheckpointError(f"shape {list(record.shape)} is absurd", tensor=name)
    first = record.storage.start * record.storage.itemsize + record.offset * dtype.itemsize
    # From the first to the last element of a view that is not empty.
    reach = sum((n - 1) * step for n, step in zip(record.shape, record.strides, strict=True))
    span_bytes = (1 + reach) * dtype.itemsize
    if count and first + span_bytes > region.nbytes:
        raise CheckpointError(
            f"shape {list(record.shape)} with strides {list(record.strides)} from byte {first} "
            f"ends at byte {first + span_bytes}, but its storage {record.storage.key!r} has "
            f"{region.nbytes} bytes",
            tensor=name,
        )
    deflated = None if region.deflated_nbytes is None else region
    start = 0 if deflated else region.offset
    span = Extent(path, start + (first if count else 0), span_bytes if count else 0)
    plain = contiguous_strides(record.shape)
    dense = is_dense(record.shape, record.strides)
    row_major = count == 0 or all(
        size == 1 or have == want
        for size, have, want in zip(record.shape, record.strides, plain, strict=True)
    )
    swapped = big_endian and dtype.itemsize > 1
    whole = dense and not (record.conj or record.neg or swapped or deflated)
    spec = TensorSpec(
        name=name,
        dtype=dtype.name,
        shape=record.shape,
        file=path,
        extent=span if whole else None,
        strides=record.strides if whole and not row_major else None,
    )
    strides = plain if row_major else record.strides
    return StoredTensor(spec, span, strides, record.conj, record.neg, swapped, deflated)


def read_values(file: ReadableFile, stored: StoredTensor) -> torch.Tensor:
    """The tensor's values, contiguous, in memory of their own.

    Raises:
        ReadError: reading failed.
        CheckpointError: compressed bytes that are damaged.
    """
    import torch

    from streamload.sources.blocks import torch_dtype

    dtype, kind = BY_NAME[stored.spec.dtype], torch_dtype(stored.spec.dtype)
    shape = stored.spec.shape
    if stored.span.nbytes == 0:
        return torch.empty(shape, dtype=kind)
    if stored.deflated is not None:
        raw = torch.frombuffer(_unpacked(file, stored, stored.deflated), dtype=torch.uint8)
    else:
        raw = torch.empty(stored.span.nbytes, dtype=torch.uint8)
        file.read_into(stored.span.offset, raw.numpy().data, tensor=stored.spec.name)
    if stored.swapped:
        # The two halves of a complex number are swapped each by itself.
        width = dtype.itemsize // (2 if dtype.kind == "complex" else 1)
        raw = raw.view(-1, width).flip(1).reshape(-1)
    values = raw.view(kind)
    if stored.strides == contiguous_strides(shape) and not (stored.conj or stored.neg):
        return values.view(shape)
    values = values.as_strided(shape, stored.strides)
    if stored.conj:
        values = values.conj().resolve_conj()
    if stored.neg:
        values = -values
    # A clone of an expanded or stepped view: the span's other elements must not stay alive.
    return values.clone(memory_format=torch.contiguous_format)


def _unpacked(file: ReadableFile, stored: StoredTensor, storage: Region) -> bytearray:
    """The bytes of the tensor's span, out of its compressed storage."""
    assert storage.deflated_nbytes is not None
    packed = file.read(storage.offset, storage.deflated_nbytes)
    data = inflated(packed, storage.nbytes)
    if data is None or (storage.checksum and zlib.crc32(data) != storage.checksum):
        raise CheckpointError(
            "its compressed bytes are damaged", path=file.path, tensor=stored.spec.name
        )
    first = stored.span.offset
    return bytearray(memoryview(data)[first : first + stored.span.nbytes])


def check_storage(storage: StorageRef, region: Region | None, *, tensor: str | None = None) -> None:
    """Refuse a storage that is not in the file, or has another size there than the pickle says."""
    key, expected = shown(storage.key), storage.numel * storage.itemsize
    if region is None:
        raise CheckpointError(f"its storage {key} is not in the file", tensor=tensor)
    if region.nbytes != expected:
        raise CheckpointError(
            f"its storage {key} has {region.nbytes} bytes, expected {expected} "
            f"({storage.numel} elements of {storage.dtype})",
            tensor=tensor,
        )
