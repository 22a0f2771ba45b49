"""A stored item of a ``.distcp`` file: a whole archive of ``torch.save``, at an offset."""

from __future__ import annotations

from streamload.core.errors import CheckpointError
from streamload.core.pieces import Box
from streamload.core.wording import printable
from streamload.sources.distributed.saved_state import Item
from streamload.sources.files import FilePart, ReadableFile
from streamload.sources.torch.pickle_records import (
    Malformed,
    Placeholder,
    TensorRef,
    UnusableTensor,
    shown,
)
from streamload.sources.torch.plain_objects import StoredObject
from streamload.sources.torch.stored_tensors import StoredTensor, place, read_values
from streamload.sources.torch.torch_files import read_zip


def stored_piece(file: ReadableFile, item: Item, name: str, box: Box, dtype: str) -> StoredTensor:
    """Where the values of one piece of a tensor lie in ``file``.

    Raises:
        CheckpointError: the item is cut, damaged, no tensor, or another than the metadata says.
    """
    part = _part(file, item, name)
    try:
        pickled, regions, big_endian = read_zip(part)
        record = pickled.value
        if not isinstance(record, TensorRef):
            raise CheckpointError(f"its piece {box} is {_what(record)}, expected a tensor")
        if record.shape != box.sizes or record.dtype != dtype:
            raise CheckpointError(
                f"its piece {box} has shape {list(record.shape)} of {record.dtype}, expected "
                f"{list(box.sizes)} of {dtype}"
            )
        stored = place(name, record, regions, path=file.path, big_endian=big_endian)
    except (CheckpointError, Malformed) as error:
        raise _located(error, file, item, name) from error
    return stored.shifted(item.offset)


def stored_object(file: ReadableFile, item: Item, name: str) -> StoredObject:
    """An object that is no tensor, such as a module's extra state; raises as ``stored_piece``."""
    part = _part(file, item, name)
    try:
        pickled, regions, big_endian = read_zip(part)
    except (CheckpointError, Malformed) as error:
        raise _located(error, file, item, name) from error

    def read(record: TensorRef) -> object:
        stored = place(name, record, regions, path=file.path, big_endian=big_endian)
        return read_values(part, stored)

    return StoredObject(name, file.path, pickled.value, read)  # type: ignore[arg-type]


def _part(file: ReadableFile, item: Item, name: str) -> FilePart:
    if item.offset + item.nbytes > file.size_bytes:
        raise CheckpointError(
            f"ends at byte {item.offset + item.nbytes}, but the file has {file.size_bytes}: it was "
            "cut short",
            path=file.path,
            tensor=name,
        )
    return FilePart(file, item.offset, item.nbytes)


def _located(error: Exception, file: ReadableFile, item: Item, name: str) -> CheckpointError:
    """The fault of one item, with file, tensor and place."""
    text = str(error).removeprefix(f"tensor {name!r}: ").removeprefix(f"{printable(file.path)}: ")
    text = f"{text} (stored at bytes {item.offset} to {item.offset + item.nbytes})"
    return CheckpointError(text, path=file.path, tensor=name)


def _what(record: object) -> str:
    if isinstance(record, UnusableTensor):
        return f"a tensor {record.kind}"
    if isinstance(record, Placeholder):
        return f"an object of {shown(record)}"
    return f"a {type(record).__name__}"
