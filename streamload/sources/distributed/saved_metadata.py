"""``.metadata`` of torch.distributed.checkpoint: which pieces there are, and where each lies.

The file is a pickle of a few dataclasses (torch/distributed/checkpoint/metadata.py and
filesystem.py). Our own reader makes inert records of them; a class that is not one of these is
refused by name, and nothing that the file names is imported or called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeGuard

from streamload.core.errors import CheckpointError, naming
from streamload.core.pieces import Box
from streamload.core.specs import Shape
from streamload.core.wording import listed
from streamload.sources.distributed.saved_state import Item, Path, SavedState, SavedTensor
from streamload.sources.files import open_file
from streamload.sources.index import fault_of_name
from streamload.sources.torch.pickle_reader import MAX_PICKLE_BYTES, Truncated, read_pickle
from streamload.sources.torch.pickle_records import (
    Call,
    Global,
    Malformed,
    Placeholder,
    RefusedGlobal,
    Size,
    shown,
)
from streamload.system.gc_pause import without_collections

# Of torch up to 2.2, properties were a class of another module.
_OWN, _OLD = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.sharded_tensor.metadata",
)
_FILES = "torch.distributed.checkpoint.filesystem"
_PROPERTIES = (f"{_OWN}.TensorProperties", f"{_OLD}.TensorProperties")
_FORMATS = (f"{_OWN}._MEM_FORMAT_ENCODING", f"{_OLD}.MEM_FORMAT_ENCODING")
_RECORDS = (
    *(f"{_OWN}.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(f"{_OWN}.{kind}StorageMetadata" for kind in ("Chunk", "Tensor", "Bytes")),
    f"{_FILES}._StorageInfo",
)
_PATHS = tuple(
    f"{module}.{name}"
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
)
# How Python 3.11 pickles a member of an enumeration: getattr(class, name).
_GETATTR = Global("builtins", "getattr")
_KNOWN = frozenset((*_RECORDS, *_PROPERTIES, *_FORMATS, *_PATHS, str(_GETATTR)))
_FIELDS = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
_VERSIONS = (None, "1.0.0")
_BYTES_PER_OBJECT = 16
# What torch writes of a piece takes at least 140 bytes.
_LEAST_BYTES_PER_PIECE = 24
# Nearly all of this pickle is objects, where that of a torch file has values beside it: what it may
# build and the work that takes are those of a file this many times as large. Torch's take a third.
_SIZES = 16
_MAX_PATH_CHARS = 4096


def read_metadata(path: str, *, saved_bytes: int) -> SavedState:
    """What ``.metadata`` at ``path`` says.

    Args:
        path: the file.
        saved_bytes: of all files of the checkpoint: what the metadata may build grows with them.

    Raises:
        CheckpointError: damaged, of a version or a form that is not known, or it names a class
            that such files have no use for.
    """
    with open_file(path) as file, naming(path):
        size = file.size_bytes
        if size > MAX_PICKLE_BYTES:
            raise CheckpointError(f"has {size} bytes; the limit is {MAX_PICKLE_BYTES}")
        data = file.read(0, size)
        with without_collections(size // _BYTES_PER_OBJECT):
            try:
                return _state(data, min(size + saved_bytes, _SIZES * size))
            except RefusedGlobal as error:
                raise CheckpointError(
                    f"{error}, a function or class that can run code, and is refused as a whole"
                ) from error
            except Malformed as error:
                fault = "was cut short" if isinstance(error, Truncated) else "damaged metadata"
                raise CheckpointError(f"{fault}: {error}") from error


def _state(data: bytes, file_bytes: int) -> SavedState:
    pickled = read_pickle(data, file_bytes=file_bytes, inert=(_GETATTR,))
    if foreign := sorted(str(name) for name in pickled.unknown if str(name) not in _KNOWN):
        raise Malformed(
            f"it names {listed(map(shown, foreign), 6)}, which torch.distributed.checkpoint does "
            "not write there (nothing that a file names is imported or called)"
        )
    if pickled.storages or pickled.end != len(data):
        raise Malformed("it holds more than one object, or tensors")
    fields = _fields(pickled.value, f"{_OWN}.Metadata")
    if others := [name for name in fields if name not in _FIELDS and fields[name]]:
        raise Malformed(f"it has the fields {listed(map(shown, others), 6)}, which are not known")
    if fields.get("version") not in _VERSIONS:
        raise Malformed(f"its version is {shown(fields['version'])}, known: {_VERSIONS[-1]!r}")
    _check_origin(fields.get("storage_meta"))
    places = _places(_dictionary(fields.get("storage_data"), "storage_data"))
    tensors: dict[str, SavedTensor] = {}
    objects: dict[str, Item | None] = {}
    left = len(data) // _LEAST_BYTES_PER_PIECE
    for name, value in _dictionary(fields.get("state_dict_metadata"), "its state dict").items():
        if not isinstance(name, str):
            raise Malformed(f"a tensor stands under {shown(name)}, which is no name")
        if _is_a(value, f"{_OWN}.BytesStorageMetadata"):
            objects[name] = places.get((name, None))
        else:
            tensors[name] = _tensor(name, value, places, left)
            left -= len(tensors[name].boxes)
    names = {*tensors, *objects}
    return SavedState(tensors, objects, _paths(fields.get("planner_data"), names))


_Places: TypeAlias = dict[tuple[str, Shape | None], Item]


def _places(stored: Mapping[object, object]) -> _Places:
    found: _Places = {}
    for key, value in stored.items():
        index, info = (
            _fields(key, f"{_OWN}.MetadataIndex"),
            _fields(value, f"{_FILES}._StorageInfo"),
        )
        name, offset = index.get("fqn"), index.get("offset")
        if not isinstance(name, str) or not (offset is None or _is_size(offset)):
            raise Malformed("a stored item without a name")
        file, start, nbytes = (info.get(k) for k in ("relative_path", "offset", "length"))
        if isinstance(file, str) and len(file) > _MAX_PATH_CHARS:
            raise Malformed(f"{shown(name)} is in a file whose name has {len(file)} characters")
        if fault := fault_of_name(file):
            raise Malformed(f"{shown(name)}: {fault}")
        if transforms := info.get("transform_descriptors"):
            kinds = transforms if isinstance(transforms, list | tuple) else [transforms]
            raise Malformed(
                f"{shown(name)} was stored through {listed(map(shown, kinds), 4)}; such transforms "
                "(compression, encryption) are not undone here"
            )
        if not (isinstance(file, str) and _is_count(start) and _is_count(nbytes)):
            raise Malformed(f"{shown(name)} is stored at no place")
        item = Item(file, start, nbytes)
        if found.setdefault((name, offset and tuple(offset)), item) != item:
            raise Malformed(f"{shown(name)} is stored twice at {shown(offset)}")
    return found


def _tensor(name: str, value: object, places: _Places, most: int) -> SavedTensor:
    fields = _fields(value, f"{_OWN}.TensorStorageMetadata")
    dtype = _dtype(name, fields.get("properties"))
    shape, chunks = fields.get("size"), fields.get("chunks")
    if not _is_size(shape) or not isinstance(chunks, list):
        raise Malformed(f"{shown(name)} has no shape or no pieces")
    if len(chunks) > most:
        raise Malformed("it says of more pieces than a file of its size should")
    boxes = []
    for chunk in chunks:
        box = _fields(chunk, f"{_OWN}.ChunkStorageMetadata")
        offsets, sizes = box.get("offsets"), box.get("sizes")
        if not (_is_size(offsets) and _is_size(sizes) and len(offsets) == len(sizes)):
            raise Malformed(f"a piece of {shown(name)} has no place in it")
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    items = tuple(places.get((name, box.offsets)) for box in boxes)
    return SavedTensor(dtype, tuple(shape), tuple(boxes), items)


def _dtype(name: str, value: object) -> str:
    """Torch's name of the element type, out of ``TensorProperties``."""
    if not _is_a(value, *_PROPERTIES) or not isinstance(value.parts[-1], tuple):
        raise Malformed(f"the properties of {shown(name)} are {shown(value)}")
    state = value.parts[-1]
    if len(state) != 5 or not isinstance(state[0], Global) or state[0].module != "torch":
        raise Malformed(f"the properties of {shown(name)} are of another form")
    dtype, layout, memory_format = state[0], state[1], state[3]
    if not isinstance(layout, Call) or layout.parts != [("torch.strided",)]:
        raise Malformed(f"{shown(name)} has another layout than torch.strided")
    if not _is_format(memory_format):
        raise Malformed(f"{shown(name)} has the memory format {shown(memory_format)}")
    return dtype.name


def _is_format(value: object) -> bool:
    """A member of the enumeration, by its value or, as Python 3.11 has it, by its name."""
    if not _is_made_by(value, *_FORMATS, str(_GETATTR)) or len(value.parts) != 2:
        return False
    args = value.parts[1]
    if not isinstance(args, tuple):
        return False
    if str(value.name) in _FORMATS:
        return args in ((0,), (1,), (2,))
    return (
        value.name == _GETATTR
        and len(args) == 2
        and isinstance(args[0], Placeholder)
        and str(args[0].name) in _FORMATS
        and isinstance(args[1], str)
    )


def _check_origin(value: object) -> None:
    """Refuse notes on where the checkpoint was saved that torch does not write."""
    where = None if value is None else _fields(value, f"{_OWN}.StorageMeta").get("checkpoint_id")
    if where is None or isinstance(where, str):
        return
    if not (
        _is_made_by(where, *_PATHS)
        and len(where.parts) == 2
        and isinstance(where.parts[1], tuple)
        and all(isinstance(part, str) for part in where.parts[1])
    ):
        raise Malformed(f"it says that it was saved at {shown(where)}")


def _paths(planned: object, names: set[str]) -> dict[str, Path]:
    if planned is None:
        return {}
    found: dict[str, Path] = {}
    for name, keys in _dictionary(planned, "planner_data").items():
        if not isinstance(name, str) or not isinstance(keys, tuple) or len(keys) > len(name) + 1:
            raise Malformed("planner_data is no table of names")
        path = tuple([key if isinstance(key, str) else str(key) for key in keys if _is_step(key)])
        chars = sum(map(len, path)) + len(path) - 1
        if len(path) != len(keys) or chars != len(name) or ".".join(path) != name:
            raise Malformed(f"planner_data leads to {shown(name)} by other keys")
        if name in names:
            found[name] = path
    return found


def _is_step(key: object) -> bool:
    return isinstance(key, str) or (isinstance(key, int) and key.bit_length() < 64)


def _is_a(value: object, *names: str) -> TypeGuard[Placeholder]:
    """True for an object that was made of nothing but its class: a dataclass's."""
    return _is_made_by(value, *names) and len(value.parts) <= 3 and value.parts[1] == ()


def _is_made_by(value: object, *names: str) -> TypeGuard[Placeholder]:
    """True for what a call of one of these gives: of the class or function, not of its result."""
    if not isinstance(value, Placeholder) or str(value.name) not in names or len(value.parts) < 2:
        return False
    made_by = value.parts[0]
    return isinstance(made_by, Placeholder) and not made_by.parts


def _fields(value: object, name: str) -> Mapping[str, Any]:
    """The fields of a dataclass's record."""
    if not _is_a(value, name):
        raise Malformed(f"{shown(value)} stands where {name} was expected")
    state = _dictionary(value.parts[2] if len(value.parts) > 2 else {}, name)
    if not all(isinstance(field, str) for field in state):
        raise Malformed(f"{name} has a field without a name")
    return state


def _dictionary(value: object, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"{what} is {shown(value)}, expected a dictionary")
    return value


def _is_size(value: object) -> TypeGuard[Size]:
    return isinstance(value, Size)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63
