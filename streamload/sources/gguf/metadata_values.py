"""The values in a GGUF header, read strictly from bytes that are fetched as they are needed."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from streamload.core.errors import CheckpointError
from streamload.sources.files import ReadableFile

MAX_HEADER_BYTES = 100_000_000
ALIGNMENT_KEY = "general.alignment"
_FIRST_BYTES = 1 << 20
_MAX_KEY_BYTES = 65_535
_MAX_NAME_BYTES = 1024

# As the format numbers them: name, bytes, and letter of ``struct`` and ``array``.
_SCALARS = {
    0: ("uint8", 1, "B"),
    1: ("int8", 1, "b"),
    2: ("uint16", 2, "H"),
    3: ("int16", 2, "h"),
    4: ("uint32", 4, "I"),
    5: ("int32", 4, "i"),
    6: ("float32", 4, "f"),
    7: ("bool", 1, "B"),
    10: ("uint64", 8, "Q"),
    11: ("int64", 8, "q"),
    12: ("float64", 8, "d"),
}
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_LENGTH = struct.Struct("<Q")

Scalar: TypeAlias = "int | float | bool | str"
Value: TypeAlias = "Scalar | Sequence[int] | Sequence[float] | Texts"


class Texts(Sequence[str]):
    """An array of strings; each is decoded when it is asked for, as many are never looked at."""

    __slots__ = ("_bytes", "_starts")

    def __init__(self, data: bytes, starts: array[int]) -> None:
        self._bytes = data
        self._starts = starts  # where each begins, and one past the last one's end

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        at %= len(self)
        return self._bytes[self._starts[at] + 8 : self._starts[at + 1]].decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        for at in range(len(self)):
            yield self[at]


class HeaderBytes:
    """A file's bytes from its start, and how far they have been read."""

    def __init__(self, file: ReadableFile) -> None:
        self._file = file
        self._held = b""
        self.position = 0

    @property
    def left(self) -> int:
        """How many bytes of the file are still ahead."""
        return self._file.size_bytes - self.position

    def take(self, count: int, what: str) -> bytes:
        """The next ``count`` bytes.

        Raises:
            CheckpointError: the file or the header's limit ends before them.
        """
        end = self.position + count
        if end > len(self._held):
            self._fetch(end, what)
        taken = self._held[self.position : end]
        self.position = end
        return taken

    def _fetch(self, end: int, what: str) -> None:
        size = self._file.size_bytes
        if end > size:
            raise CheckpointError(
                f"cut short: {what} at byte {self.position} needs {end - self.position} bytes, "
                f"but the file has {size} bytes in all"
            )
        if end > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{what} at byte {self.position} needs {end - self.position} bytes, but a header "
                f"may have {MAX_HEADER_BYTES} at most"
            )
        more = min(max(end, 2 * len(self._held), _FIRST_BYTES), size, MAX_HEADER_BYTES)
        self._held += self._file.read(len(self._held), more - len(self._held))

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def text(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise CheckpointError(f"{what} has {length} bytes; the limit is {limit}")
        return _decoded(self.take(length, what), what)

    def key(self) -> str:
        key = self.text("a key", _MAX_KEY_BYTES)
        if not key:
            raise CheckpointError(f"an empty key before byte {self.position}")
        return key

    def name(self) -> str:
        return self.text("a tensor's name", _MAX_NAME_BYTES)

    def value(self, key: str) -> Value:
        """The value of ``key``, its type first."""
        what = f"the value of {key!r}"
        kind = self.u32(f"the type of {key!r}")
        if key == ALIGNMENT_KEY and kind != _UINT32:
            raise CheckpointError(f"{key!r} is of type {kind}, expected {_UINT32} (uint32)")
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            return self._scalar(kind, what)
        kind = self.u32(f"the element type of {key!r}")
        count = self.u64(f"the length of {key!r}")
        if kind == _STRING:
            return self._texts(count, what)
        if kind == _ARRAY:
            raise CheckpointError(f"{what} is an array of arrays, which the format does not have")
        return self._array(kind, count, what)

    def _scalar(self, kind: int, what: str) -> Scalar:
        _, nbytes, letter = _known(kind, what)
        (value,) = struct.unpack(f"<{letter}", self.take(nbytes, what))
        if kind != _BOOL:
            found: Scalar = value
            return found
        if value > 1:
            raise CheckpointError(f"{what} is the bool {value}, expected 0 or 1")
        return bool(value)

    def _array(self, kind: int, count: int, what: str) -> Sequence[int] | Sequence[float]:
        _, nbytes, letter = _known(kind, what)
        data = self.take(self._fitting(count, nbytes, what) * nbytes, what)
        values = array(letter, data)
        assert values.itemsize == nbytes
        if struct.pack("=H", 1) != struct.pack("<H", 1):
            values.byteswap()
        if kind == _BOOL and count and max(values) > 1:
            raise CheckpointError(f"{what} holds the bool {max(values)}, expected 0 or 1")
        return values

    def _texts(self, count: int, what: str) -> Texts:
        self._fitting(count, _LENGTH.size, what)
        start = self.position
        starts = array("Q", [0])
        for _ in range(count):
            at = self.position
            end = at + 8
            if end > len(self._held):
                self._fetch(end, what)
            end += _LENGTH.unpack_from(self._held, at)[0]
            if end > len(self._held):
                self.position += 8
                self._fetch(end, what)
            self.position = end
            starts.append(end - start)
        data = self._held[start : self.position]
        _check_texts(data, starts, what)
        return Texts(data, starts)

    def _fitting(self, count: int, nbytes: int, what: str) -> int:
        """``count``, unless so many of at least ``nbytes`` bytes are not in the file."""
        if count > self.left // nbytes:
            raise CheckpointError(
                f"cut short: {what} at byte {self.position} is an array of {count} of at least "
                f"{nbytes} bytes, but the file has {self.left} bytes from there"
            )
        return count


def _known(kind: int, what: str) -> tuple[str, int, str]:
    if kind not in _SCALARS:
        raise CheckpointError(f"{what} is of type {kind}, which the format does not have")
    return _SCALARS[kind]


def _decoded(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{what} is not valid UTF-8: {data[:40]!r}") from error


def _check_texts(data: bytes, starts: Sequence[int], what: str) -> None:
    """Refuse an array with a text that is not UTF-8."""
    if data.isascii():
        return
    for begin, end in pairwise(starts):
        _decoded(data[begin + 8 : end], what)
