"""Files of ``torch.save`` (``.pt``, ``.bin``, ``.pth``), one or several, read in blocks.

The pickle inside is read by ``pickle_reader``, which cannot run anything; torch itself is needed
only for values. Both formats are known: the zip one, and the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from streamload.core.errors import CheckpointError, naming
from streamload.core.specs import Catalog, Extent
from streamload.core.wording import format_bytes, listed, plural, printable
from streamload.sources.block_source import BlockSource, join_files, read_each
from streamload.sources.files import Readable, ReadableFile
from streamload.sources.recognise import SNIFFED_BYTES, describe_start
from streamload.sources.torch.legacy_format import is_legacy, read_legacy
from streamload.sources.torch.pickle_reader import (
    MAX_PICKLE_BYTES,
    Pickled,
    Truncated,
    read_pickle,
)
from streamload.sources.torch.pickle_records import (
    Malformed,
    RefusedGlobal,
    TensorRef,
    shown,
)
from streamload.sources.torch.plain_objects import StoredObject
from streamload.sources.torch.state_dicts import find_weights
from streamload.sources.torch.stored_tensors import (
    Region,
    StoredTensor,
    check_storage,
    place,
    read_values,
)
from streamload.sources.torch.zip_archive import Archive, read_archive
from streamload.system.gc_pause import without_collections

if TYPE_CHECKING:
    import torch

# caffe2/serialize/versions.h: what torch reads, and where it is noted.
_LAST_VERSION = 10
# What is unpacked of a compressed file beside its weights, and how much more for each byte of it.
_UNPACKED_BYTES, _UNPACKED_PER_BYTE = 8 << 20, 4
# What its tensors may take, of which some can lie over each other, or be expanded, or packed.
_VALUES_BYTES, _VALUES_PER_BYTE = 32 << 20, 16
_BYTES_PER_OBJECT = 16
_VERSION_RECORDS = (b".data/version", b"version")


@dataclass(frozen=True, slots=True)
class TorchFile:
    """One open file and the tensors of its state dict, in the state dict's order.

    ``checksums``: the CRC-32 of each storage that has one, not compared with the bytes yet.
    ``objects`` and ``versions``: see Source.
    """

    file: ReadableFile
    tensors: Mapping[str, StoredTensor]
    notices: tuple[str, ...]
    checksums: Mapping[Extent, int]
    objects: Mapping[str, StoredObject]
    versions: Mapping[str, Mapping[str, Any]]


class TorchSource(BlockSource):
    """Tensors of one or several torch files; ``open_torch`` makes it.

    Attributes:
        checksums: CRC-32 of each storage of a zip archive as its writer noted it. Reading does
            not compare them; a byte that flipped on the disk shows only there.
    """

    is_replaced_whole = False  # torch.save writes over what is there

    def __init__(
        self,
        path: str,
        parts: Sequence[TorchFile],
        tensors: Mapping[str, StoredTensor],
        notices: tuple[str, ...] = (),
    ) -> None:
        super().__init__(path, [part.file for part in parts])
        self._stored = tensors
        self.checksums = {extent: crc for part in parts for extent, crc in part.checksums.items()}
        self.objects = {name: of for part in parts for name, of in part.objects.items()}
        self.versions = {path: of for part in parts for path, of in part.versions.items()}
        self.catalog = Catalog(
            {name: stored.spec for name, stored in self._stored.items()},
            notices=(*(notice for part in parts for notice in part.notices), *notices),
        )

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        return read_values(self._files[stored.spec.file], stored)


def open_torch(
    paths: Sequence[str],
    *,
    given: str,
    prefix: str | None = None,
    owners: Mapping[str, str] = MappingProxyType({}),
) -> TorchSource:
    """Open torch files as one checkpoint; only their headers are read.

    ``given`` is the path the user named, for messages. ``prefix`` is that of the names that are
    wanted: it may name one of several state dicts in a file. ``owners`` is the file of each
    tensor, as the index says. The tensors stand in the order of the
    files and of the state dicts in them.

    Raises:
        CheckpointError: a file cannot be used, or two files have a tensor of the same name.
    """
    with ExitStack() as opened:
        parts = read_each(paths, lambda f: read_torch_file(f, prefix), opened, given=given)
        files = ((part.file.path, part.tensors) for part in parts)
        tensors, notices = join_files(files, given=given, owners=owners)
        opened.pop_all()
    return TorchSource(given, parts, tensors, notices)


def read_torch_file(file: ReadableFile, prefix: str | None = None) -> TorchFile:
    """The tensors of one file; reads the pickle and the directory, no values.

    Raises:
        CheckpointError: not a torch file, cut or damaged, holds something that is not read, or
            no state dict can be made out.
    """
    many = min(file.size_bytes, MAX_PICKLE_BYTES) // _BYTES_PER_OBJECT
    with naming(file.path), without_collections(many):
        try:
            return _read(file, prefix)
        except RefusedGlobal as error:
            raise CheckpointError(
                f"{error}, a function or class that can run code, and is refused as a whole. Save "
                f"the tensors by themselves: torch.save(model.state_dict(), ...)"
            ) from error
        except Malformed as error:
            fault = "was cut short" if isinstance(error, Truncated) else "damaged pickle"
            raise CheckpointError(f"{fault}: {error}") from error


def _read(file: ReadableFile, prefix: str | None) -> TorchFile:
    start = file.read(0, min(SNIFFED_BYTES, file.size_bytes))
    legacy = is_legacy(start)
    if not legacy and not start.startswith(b"PK\3\4"):
        raise CheckpointError(_what_else(start))
    pickled, regions, big_endian = (*read_legacy(file), False) if legacy else read_zip(file)
    weights, notices, beside = find_weights(pickled.value, prefix, file_bytes=file.size_bytes)
    if pickled.unknown:
        notices.append(
            f"objects beside the weights are not rebuilt (nothing that a file names is imported or "
            f"called): {listed(map(shown, pickled.unknown), 20)}"
        )
    tensors = {
        name: place(name, record, regions, path=file.path, big_endian=big_endian)
        for name, record in weights.items()
    }
    _check_values(tensors, file.size_bytes)
    # Contradictions beside the weights are refused too: a file that holds one is damaged.
    used = set(map(id, weights.values()))
    for record in pickled.tensors:
        if id(record) not in used:
            place("(beside the weights)", record, regions, path=file.path)
    for key, storage in pickled.storages.items():
        check_storage(storage, regions.get(key))
    if any(region.deflated_nbytes is not None for region in regions.values()):
        notices.append("its records are compressed: each is read and unpacked whole, not in blocks")
    if legacy:
        notices.append("in torch's format from before zip: read in blocks, not memory-mapped")
    checksums = {
        Extent(file.path, region.offset, region.nbytes): region.checksum
        for region in regions.values()
        if region.checksum and region.deflated_nbytes is None
    }
    named = tuple(f"{printable(file.path)}: {notice}" for notice in notices)

    def read(record: TensorRef) -> torch.Tensor:
        name = "(in an extra state)"
        stored = place(name, record, regions, path=file.path, big_endian=big_endian)
        return read_values(file, stored)

    objects = {
        name: StoredObject(name, file.path, record, read) for name, record in beside.objects.items()
    }
    return TorchFile(file, tensors, named, checksums, objects, beside.versions)


def _check_values(tensors: Mapping[str, StoredTensor], file_bytes: int) -> None:
    """Refuse a small file of which a load would make a huge model."""
    values = sum(stored.spec.nbytes for stored in tensors.values())
    values += sum(stored.deflated.nbytes for stored in tensors.values() if stored.deflated)
    if values > _VALUES_BYTES + _VALUES_PER_BYTE * file_bytes:
        raise CheckpointError(
            f"its {plural(len(tensors), 'tensor')} would take {format_bytes(values)}, but the file "
            f"has {format_bytes(file_bytes)}: they are expanded, lie over each other many times, "
            "or are packed; save them as contiguous tensors, each once"
        )


def read_zip(file: Readable) -> tuple[Pickled, Mapping[str, Region], bool]:
    """The object in a file of ``torch.save``, where its storages are, and if they are big-endian.

    Raises:
        CheckpointError, Malformed: not such a file, or a damaged one.
    """
    archive = read_archive(file)
    folder = _torch_folder(archive)
    # All of them, as torch does: a damaged directory may have hidden what it no longer lists.
    places = archive.locate_all()
    order = archive.records.get(folder + b"byteorder")
    mark = b"little" if order is None else archive.read(order, max_bytes=16)
    if mark not in (b"little", b"big"):
        raise CheckpointError(f"has the unknown byte order {mark!r}")
    unpacked = _UNPACKED_BYTES + _UNPACKED_PER_BYTE * file.size_bytes
    most = min(MAX_PICKLE_BYTES, unpacked)
    data = archive.read(archive.records[folder + b"data.pkl"], max_bytes=most)
    pickled = read_pickle(data, file_bytes=file.size_bytes)
    _check_version(archive, folder)
    for other in archive.records.values():
        if other.compressed and not other.name.startswith(folder + b"data"):
            archive.read(other, max_bytes=unpacked)  # refused if it cannot be unpacked
            unpacked -= other.nbytes
    regions: dict[str, Region] = {}
    for key in pickled.storages:
        record = archive.records.get(folder + b"data/" + key.encode("utf-8", "surrogatepass"))
        if record is not None:
            regions[key] = Region(
                places[record.name],
                record.nbytes,
                record.checksum,
                record.stored_nbytes if record.compressed else None,
            )
    return pickled, regions, mark == b"big"


def _check_version(archive: Archive, folder: bytes) -> None:
    """Refuse an archive without the number of its format, or with one that does not exist yet."""
    name = next((n for n in _VERSION_RECORDS if folder + n in archive.records), None)
    text = b"" if name is None else archive.read(archive.records[folder + name], max_bytes=64)
    if not text.strip().isdigit() or not 1 <= int(text) <= _LAST_VERSION:
        raise CheckpointError(
            f"its record 'version' holds {text!r}, expected a number up to {_LAST_VERSION}"
        )


def _torch_folder(archive: Archive) -> bytes:
    """The one folder of the archive that holds ``data.pkl``, with its slash."""
    names = [n for n in archive.records if n.count(b"/") == 1 and n.endswith(b"/data.pkl")]
    if len(names) != 1:
        held = listed(map(printable, sorted(archive.records)), 3) or "nothing"
        npz = all(name.endswith(b".npy") for name in archive.records) and archive.records
        kind = "numpy's zip archive (.npz)" if npz else "a zip archive"
        raise CheckpointError(f"is not a file that torch.save wrote: it holds {held} and is {kind}")
    folder = names[0].removesuffix(b"data.pkl")
    if not all(name.startswith(folder) for name in archive.records):
        raise CheckpointError("damaged zip archive: not all of its records are in one folder")
    if folder + b"constants.pkl" in archive.records:
        raise CheckpointError(
            "is a TorchScript archive: a program with its weights, which is not run; save "
            "its state_dict() with torch.save"
        )
    return folder


def _what_else(start: bytes) -> str:
    if not start:
        return "is empty (0 bytes)"
    if mishap := describe_start(start):
        return mishap
    if start[8:9] == b"{":
        return "holds safetensors data, not what torch.save writes"
    if start.startswith(b"\x80") and start[1:2] <= b"\x05":
        return "is a plain pickle, not what torch.save writes; plain pickles are not read"
    return "is not a file that torch.save wrote (neither zip nor the format before it)"
