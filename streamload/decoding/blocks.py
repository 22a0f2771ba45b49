"""GGUF's blocks: what is known of them without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from streamload.core.encoding import Encoding

DECODED = frozenset(
    (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    )
)


@dataclass(frozen=True)
class Blocks(Encoding):
    """Blocks of numbers of a few bits with their scales; the one part is their bytes.

    Attributes:
        type: ggml's name of the type, one of DECODED.
        elements, nbytes: of one block.
    """

    kind: ClassVar[str] = "blocks"

    type: str = ""
    elements: int = 1
    nbytes: int = 1

    @property
    def words(self) -> str:
        return self.type

    @property
    def quantum(self) -> int:
        return self.elements

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        yield 0, start // self.elements * self.nbytes, stop // self.elements * self.nbytes

    def scratch_bytes(self, count: int) -> int:
        # Numbers of a byte each twice, and the scales of 16 of them in float32.
        return 3 * count
