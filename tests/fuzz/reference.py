"""A second, independent reading of torch files: Python's own pickle with a short list of names.

For pickles of later protocols and odd but legal opcodes, which ``torch.load(weights_only=True)``
does not take and streamload does.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import struct
import zipfile
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

__all__ = ["by_pickle", "by_torch_distributed"]

_NAMES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("collections", "OrderedDict"): collections.OrderedDict,
}
_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}  # fmt: skip


_BESIDE = {
    ("torch", "device"), ("builtins", "set"), ("__builtin__", "set"), ("torch", "Size"),
    ("torch._utils", "_rebuild_sparse_tensor"), ("_codecs", "encode"),
    ("torch.serialization", "_get_layout"), ("collections", "defaultdict"),
    ("torch.nn.parameter", "Parameter"), ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch", "float16"),
}  # fmt: skip


def _nothing(*_arguments: object) -> None:
    """Stands for calls beside the weights."""


class _Company:
    """Stands for a class of the file's own."""

    def __init__(self, *_arguments: object, **_named: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None: ...

    def extend(self, values: object) -> None: ...


class _Reader(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.storages: dict[str, torch.UntypedStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) in _BESIDE:
            return _nothing
        if (module, name) in _NAMES:
            return _NAMES[module, name]
        if module == "os" or name in ("eval", "getattr", "load"):
            raise KeyError(name)
        return _Company

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, numel, *_ = pid
        nbytes = numel * dtype.itemsize
        if not 0 <= nbytes <= 1 << 20:
            raise ValueError("a storage that no seed has")
        storage = self.storages.setdefault(key, torch.UntypedStorage(nbytes))
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _fill(storage: torch.UntypedStorage, data: bytes) -> None:
    if len(data) != storage.nbytes():
        raise ValueError("a storage of another size")
    if data:
        torch.tensor([], dtype=torch.uint8).set_(storage).copy_(
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
        )


def by_pickle(path: str) -> Any:
    """The object in the file.

    Raises:
        Exception: of any kind, where this reading does not take the file either.
    """
    if zipfile.is_zipfile(path):
        # torch's own directory reader: what it takes is not for Python's to refuse.
        archive = torch._C.PyTorchFileReader(path)
        reader = _Reader(io.BytesIO(archive.get_record("data.pkl")))
        tree = reader.load()
        for key, storage in reader.storages.items():
            _fill(storage, archive.get_record(f"data/{key}"))
        return tree
    with open(path, "rb") as file:
        stream = io.BytesIO(file.read())
    for _ in range(3):
        pickle.Unpickler(stream).load()
    reader = _Reader(stream)
    tree = reader.load()
    for key in pickle.Unpickler(stream).load():
        (count,) = struct.unpack("<q", stream.read(8))
        storage = reader.storages[key]
        _fill(storage, stream.read(storage.nbytes()) if count >= 0 else b"")
    return tree


_OF_METADATA = {
    *((metadata.__name__, name) for name in dir(metadata)),
    (filesystem.__name__, "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in ("float32", "float64", "bfloat16", "int64", "float16")),
}


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _OF_METADATA or name.startswith("__"):
            raise KeyError(name)
        return super().find_class(module, name)


class _Folder(FileSystemReader):
    """Torch's own reader, with metadata that came by an unpickler of the format's classes alone."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        with open(pathlib.Path(folder) / ".metadata", "rb") as file:
            self.found = _MetadataReader(file).load()
        self.found.state_dict_metadata = {
            name: value
            for name, value in self.found.state_dict_metadata.items()
            if not isinstance(value, metadata.BytesStorageMetadata)
            and not name.startswith("optimizer")
        }

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        return self.found


def by_torch_distributed(folder: str) -> dict[str, torch.Tensor]:
    """The tensors in a folder of torch.distributed.checkpoint, by their flat names.

    Raises:
        Exception: of any kind, where torch does not take it.
    """
    found: dict[str, Any] = {}
    reader, planner = _Folder(folder), _EmptyStateDictLoadPlanner()
    try:
        _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:  # which is no Exception
        raise ValueError("torch refuses it") from error
    return found
