"""Rotary rows in pairs, as llama.cpp has them, put back into halves. No torch import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from streamload.core.encoding import Encoding


@dataclass(frozen=True)
class Pairs(Encoding):
    """Rows of heads, in each of which those of one pair follow each other; halves come out.

    The one part is the stored tensor, which may be encoded. As ``mapping.transforms.Interleaved``,
    but of the stored tensor, before anything is known of where it goes.

    Attributes:
        head: rows of one head.
        columns: of the matrix; 1 for a bias.
    """

    kind: ClassVar[str] = "pairs"

    head: int = 2
    columns: int = 1

    @property
    def words(self) -> str:
        inner = self.parts[0].encoding
        return "interleaved" if inner is None else f"{inner.words}+interleaved"

    @property
    def quantum(self) -> int:
        return self.head * self.columns

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        yield 0, start, stop
