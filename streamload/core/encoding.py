"""What is known of a tensor whose stored bytes must be decoded: frozen, pure, no torch import."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from streamload.core.dtypes import BY_NAME

if TYPE_CHECKING:
    from streamload.core.specs import TensorSpec

# A chunk's worth, so that calls cost little: threads that decode hand Python's lock to each other
# with each of them. Twice as many steps that stay in a core's caches took longer.
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Encoding(ABC):
    """How rows of stored tensors become rows of values; a TensorSpec that has one has no extent.

    A subclass is one encoding; ``decoding.registry`` names the function that decodes it.

    Attributes:
        kind: which decoder it takes.
        parts: the stored tensors it reads; a part may be encoded itself.
        stored_dtype: the safetensors dtype of what holds the values, for reports.
        made_dtype: safetensors name of what a target becomes that nobody asked a dtype for; ``""``
            for the dtype of the values.
    """

    kind: ClassVar[str]

    parts: tuple[TensorSpec, ...]
    stored_dtype: str
    made_dtype: str = "BF16"

    @property
    @abstractmethod
    def words(self) -> str:
        """What it is, for reports: ``fp8 in blocks of 128 x 128``."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for encodings that make the same values of parts of the same names."""
        own = [getattr(self, field.name) for field in fields(self) if field.name != "parts"]
        parts = [(part.name, part.encoding and part.encoding.key) for part in self.parts]
        return (self.kind, *own, *parts)

    @property
    def quantum(self) -> int:
        """Values are decoded from and up to multiples of so many."""
        return 1

    @abstractmethod
    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """What the values [start, stop) need, as (part, start, stop) in the part's elements.

        Values are counted in memory order, as are elements; both bounds are multiples of the
        quantum, or the end.
        """

    @property
    def at_once(self) -> int:
        """How many values are decoded at once, about: so that they stay in a core's caches."""
        return _AT_ONCE

    @property
    def may_refuse(self) -> bool:
        """True if its parts can turn out to contradict each other, which only their values tell."""
        return any(part.encoding is not None and part.encoding.may_refuse for part in self.parts)

    def scratch_bytes(self, count: int) -> int:
        """What decoding ``count`` values takes for a moment, beside them and what is read."""
        del count
        return 0


def values_at_once(encoding: Encoding) -> int:
    """How many values one call decodes at most: what stays in a core's caches, or one quantum."""
    quantum = max(encoding.quantum, 1)
    return max(encoding.at_once // quantum, 1) * quantum


def staging_bytes(spec: TensorSpec) -> int:
    """What one thread holds while it decodes a tensor, beside what it gives out."""
    encoding, itemsize = spec.encoding, BY_NAME[spec.dtype].itemsize
    if encoding is None:
        return 0 if spec.extent is not None else spec.nbytes
    if not spec.nbytes:
        return 0
    count = min(values_at_once(encoding), spec.nbytes // itemsize)
    held = count * itemsize + encoding.scratch_bytes(count)
    for at, first, last in encoding.reads(0, count):
        part = encoding.parts[at]
        held += (last - first) * BY_NAME[part.dtype].itemsize + staging_bytes(part)
    return held
