"""Objects of a state dict that are no tensors (extra states), made of a pickle's records."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from streamload.core.dtypes import BY_TORCH_NAME
from streamload.core.errors import CheckpointError
from streamload.sources.torch.pickle_records import (
    Call,
    Entries,
    Global,
    Malformed,
    Placeholder,
    Size,
    TensorRef,
    UnusableTensor,
    shown,
)

if TYPE_CHECKING:
    import torch

_MakerOf: TypeAlias = "Callable[[Sequence[Any], Sequence[Any]], object]"
Read: TypeAlias = "Callable[[TensorRef], torch.Tensor | TensorRef]"
_MAX_DEPTH = 100
_UNFINISHED = object()
_SIMPLE = (bool, int, float, str, bytes)
_FACTORIES: dict[str, Any] = {
    "None": None,
    **{f"builtins.{kind.__name__}": kind for kind in (list, dict, set, int, float)},
}


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that can be made of what a file holds: plain data, tensors, ``io.BytesIO``.

    Attributes:
        name: of its entry.
        path: of the file, for messages.
        record: as the pickle reader gives it.
        read: gives the values of a tensor in it.
    """

    name: str
    path: str
    record: object
    read: Callable[[TensorRef], torch.Tensor]

    def fault(self) -> str:
        """Why it cannot be made, or nothing; reads no values."""
        try:
            _Maker(lambda ref: ref).make(self.record)
        except Malformed as error:
            return str(error)
        return ""

    def value(self) -> object:
        """The object, each time a new one.

        Raises:
            CheckpointError: see ``fault``.
            ReadError: a tensor in it cannot be read.
        """
        try:
            return _Maker(self.read).make(self.record)
        except Malformed as error:
            raise CheckpointError(str(error), path=self.path, tensor=self.name) from error


class _Maker:
    """Makes an object of its record; what occurs twice in it is made once, as pickle does."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._made: dict[int, object] = {}

    def make(self, record: object, depth: int = 0) -> Any:
        if record is None or type(record) in _SIMPLE:
            return record
        if depth > _MAX_DEPTH:
            raise Malformed(f"is nested more than {_MAX_DEPTH} deep")
        if id(record) not in self._made:
            self._made[id(record)] = _UNFINISHED
            self._made[id(record)] = self._new(record, depth + 1)
        if self._made[id(record)] is _UNFINISHED:
            raise Malformed("holds itself")
        return self._made[id(record)]

    def _new(self, record: object, depth: int) -> object:
        if isinstance(record, TensorRef):
            return self._read(record)
        if isinstance(record, dict):
            return self._dictionary(record, depth)
        if isinstance(record, Size):
            import torch

            return torch.Size(record)
        if isinstance(record, list | tuple):
            return type(record)([self.make(part, depth) for part in record])
        if isinstance(record, Call):
            return self._called(record, depth)
        if isinstance(record, Global) and record.module == "torch":
            import torch

            if record.name in BY_TORCH_NAME and hasattr(torch, record.name):
                return getattr(torch, record.name)
        if isinstance(record, UnusableTensor):
            raise Malformed(f"holds a tensor {record.kind}")
        what = f"an object of {shown(record)}" if isinstance(record, Placeholder) else shown(record)
        raise Malformed(f"holds {what}, which is not rebuilt")

    def _dictionary(self, record: dict[object, object], depth: int) -> dict[object, object]:
        made: dict[object, object] = {}
        attributes = None
        if isinstance(record, Entries):
            made, attributes = self._called(record.call, depth), self.make(record.state, depth)
        try:
            for key, value in record.items():
                made[self.make(key, depth)] = self.make(value, depth)
            if attributes is not None:  # such as the _metadata of a state dict
                vars(made).update(attributes)
        except (TypeError, ValueError) as error:
            raise Malformed(f"holds a damaged dictionary ({error})") from error
        return made

    def _called(self, call: Call, depth: int) -> Any:
        """What a call of the table gives; each is checked before it is made."""
        name = str(call.name)
        args = call.parts[0] if isinstance(call.parts[0], tuple) else ()
        rest = [self.make(part, depth) for part in call.parts[1:]]
        if name == "collections.defaultdict":
            factory = args[0] if args else None
            if str(factory) not in _FACTORIES:
                raise Malformed(f"holds a defaultdict of {shown(factory)}, which is not rebuilt")
            return defaultdict(_FACTORIES[str(factory)])
        given = [self.make(part, depth) for part in args]
        maker = _MAKERS.get(name)
        try:
            if maker is not None:
                return maker(given, rest)
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            raise Malformed(f"holds a damaged {name} ({error})") from error
        raise Malformed(f"holds a {name}, which is not rebuilt")


def _set(kind: type[set[object] | frozenset[object]]) -> _MakerOf:
    return lambda given, rest: kind([*(given[0] if given else ()), *rest])


def _bytes(given: Sequence[Any], _rest: Sequence[Any]) -> bytes:
    # How protocol 2 writes bytes: their text in Latin-1.
    text, encoding = given
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"encoded in {encoding}")
    return str(text).encode("latin1")


def _bytearray(given: Sequence[Any], _rest: Sequence[Any]) -> bytearray:
    if given and not isinstance(given[0], bytes):
        raise TypeError("not made of bytes")
    return bytearray(*given)


def _counter(given: Sequence[Any], rest: Sequence[Any]) -> object:
    (counts,) = given or [{}]
    if rest or not isinstance(counts, dict):
        raise TypeError("not made of a dictionary")
    return Counter(counts)


def _memory_file(_given: Sequence[Any], rest: Sequence[Any]) -> io.BytesIO:
    held, position, attributes = rest[-1]
    if not isinstance(held, bytes) or attributes:
        raise TypeError("not made of bytes alone")
    file = io.BytesIO(held)
    file.seek(position)
    return file


def _device(given: Sequence[Any], _rest: Sequence[Any]) -> object:
    import torch

    return torch.device(*given)


_MAKERS: dict[str, _MakerOf] = {
    "collections.OrderedDict": lambda _given, _rest: OrderedDict(),
    "collections.Counter": _counter,
    "builtins.set": _set(set),
    "builtins.frozenset": _set(frozenset),
    "builtins.bytearray": _bytearray,
    "builtins.complex": lambda given, _rest: complex(*given),
    "_codecs.encode": _bytes,
    "_io.BytesIO": _memory_file,
    "torch.device": _device,
}
