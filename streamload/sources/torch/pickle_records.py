"""Inert records for what a torch pickle holds; nothing in here has an effect."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamload.core.dtypes import BY_TORCH_NAME
from streamload.core.specs import Shape

_MAX_SHOWN = 200
# Of names and keys. Published names have less than 300 characters.
MAX_NAME_CHARS = 16_384
# Integers of so many bits hash to themselves, or nearly: those of a file's choice, if they are
# long, can all have one hash, and a table of them takes a time that grows with its square.
_MAX_KEY_BITS = 64


class Malformed(Exception):  # noqa: N818  # never leaves the sources: translated with the path
    """The pickle contradicts itself or uses something that is not allowed."""


class RefusedGlobal(Malformed):
    """The pickle names a class or function that can run something."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name the pickle mentions: ``module.name``, not the thing itself."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A run of stored elements.

    Attributes:
        key: names the record that holds the bytes.
        dtype: torch's name of the element type (``"uint8"`` for untyped storages).
        numel: elements in the record.
        start: first element, for the views of the format before zip.
    """

    key: str
    dtype: str
    numel: int
    start: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        known = BY_TORCH_NAME.get(self.dtype)
        return known.itemsize if known else (4 if self.dtype == "qint32" else 1)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view of a storage; all numbers are elements of ``dtype``."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: Shape
    strides: Shape
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class UnusableTensor:
    """A tensor of a kind that is recognised but not read."""

    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class Placeholder:
    """Stands for a class or function that is not of the table, and for whatever it would make.

    ``parts`` is what the pickle put into it: arguments, state, items.
    """

    name: Global
    parts: list[object] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a harmless name of the table, kept as it stands: extra states are made of it.

    ``parts`` begins with the arguments; items and state that the pickle adds follow.
    """

    name: Global
    parts: list[object]


class Entries(dict[object, object]):
    """What the pickle makes by calling a kind of dictionary.

    Attributes:
        call: the name that is called, and its arguments.
        state: what is set on it; of a state dict, its ``_metadata``.
    """

    call: Call
    state: object = None


class Size(tuple[int, ...]):
    """A ``torch.Size``."""


def holds_tensor(value: object) -> bool:
    """True if a tensor is somewhere in ``value``, placeholders and cycles included."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, TensorRef | UnusableTensor):
            return True
        if id(value) in seen:
            continue
        if isinstance(value, Placeholder | Call):
            value = value.parts
        if isinstance(value, dict):
            seen.add(id(value))
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            seen.add(id(value))
            waiting.extend(value)
    return False


def is_key(value: object) -> bool:
    """True for what may be a dictionary key here: hashing and comparing it is quick."""
    if isinstance(value, tuple):
        return len(value) < 16 and all(_is_scalar(part) for part in value)
    return _is_scalar(value)


def _is_scalar(value: object) -> bool:
    if isinstance(value, str | bytes):
        return len(value) <= MAX_NAME_CHARS
    if isinstance(value, int):
        return value.bit_length() <= _MAX_KEY_BITS
    return value is None or isinstance(value, float | Global | Placeholder | Call)


def shown(value: object) -> str:
    """A key or another small value for a message: short, whatever the file holds."""
    if isinstance(value, int) and value.bit_length() > _MAX_KEY_BITS:
        return "a huge number"
    if isinstance(value, str | bytes):
        value = value[: _MAX_SHOWN + 1]
    if not _is_scalar(value):
        return f"a {type(value).__name__}"
    if isinstance(value, Placeholder | Call):
        value = value.name
    text = str(value) if isinstance(value, Global) else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
