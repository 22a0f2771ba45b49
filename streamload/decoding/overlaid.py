"""A stored tensor of which an adapter replaces all or some rows, or adds to it. No torch import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from streamload.core.encoding import Encoding
from streamload.core.specs import TensorSpec, numel


def after(spec: TensorSpec, words: str) -> str:
    """The words for what is done to ``spec``, those for how it is made before them."""
    return words if spec.encoding is None else f"{spec.encoding.words}+{words}"


@dataclass(frozen=True)
class Replaced(Encoding):
    """Its one part takes the place of another tensor; it becomes of that one's dtype."""

    kind: ClassVar[str] = "replaced"

    @property
    def words(self) -> str:
        return "replaced"

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        yield 0, start, stop


@dataclass(frozen=True)
class Added(Encoding):
    """The first part, and ``scale`` times the second, which is of the same shape."""

    kind: ClassVar[str] = "added"

    scale: float = 1.0

    @property
    def words(self) -> str:
        return after(self.parts[0], f"added(scale={self.scale:.6g})")

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        yield 0, start, stop
        yield 1, start, stop

    def scratch_bytes(self, count: int) -> int:
        return 8 * count


@dataclass(frozen=True)
class RowsReplaced(Encoding):
    """The first part ``[rows, columns]``; its row ``indices[i]`` is row i of the second part."""

    kind: ClassVar[str] = "rows_replaced"

    columns: int = 1
    indices: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        return after(self.parts[0], f"rows replaced({len(self.indices)})")

    @property
    def quantum(self) -> int:
        return self.columns

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        yield 0, start, stop
        yield 1, 0, numel(self.parts[1].shape)
