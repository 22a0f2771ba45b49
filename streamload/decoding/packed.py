"""Linear weights kept as ``[in, out]`` in 32-bit words: GPTQ's and AWQ's. No torch import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from streamload.core.encoding import Encoding
from streamload.core.specs import numel

# AWQ's kernels want the numbers of a word in this order: word bits 4k … hold column ORDER[k].
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class PackedWords(Encoding):
    """Unsigned numbers of 2, 4 or 8 bits with a scale and a zero for each group of inputs.

    Its parts: the words (GPTQ's ``[in / n, out]``, AWQ's ``[in, out / n]``, n numbers in a word),
    scales ``[groups, out]``, zeros ``[groups, out / n]``, and the group of each input ``[in]`` if
    there are four parts. A value is (number - zero) x scale, in float32; they are in the order
    ``[in, out]``.

    Attributes:
        bits: of a number.
        inputs, outputs: of the layer.
        group: inputs in a group.
        by_columns: words hold columns in AWQ's order, not rows.
        zero_offset: what is added to a stored zero (GPTQ's first format stores one less).
    """

    kind: ClassVar[str] = "packed"

    bits: int = 4
    inputs: int = 1
    outputs: int = 1
    group: int = 1
    by_columns: bool = False
    zero_offset: int = 0

    @property
    def words(self) -> str:
        order = ", inputs in any order" if len(self.parts) > 3 else ""
        return f"int{self.bits} in groups of {self.group} inputs{order}"

    @property
    def in_word(self) -> int:
        """Numbers in a word."""
        return 32 // self.bits

    @property
    def quantum(self) -> int:
        return self.outputs if self.by_columns else self.outputs * self.in_word

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        yield 0, start // self.in_word, stop // self.in_word
        first, last = start // self.outputs, stop // self.outputs
        low, high = first // self.group, (last - 1) // self.group + 1
        if len(self.parts) > 3:
            low, high = 0, self.parts[1].shape[0]
            yield 3, first, last
        yield 1, low * self.outputs, high * self.outputs
        across = numel(self.parts[2].shape[1:])
        yield 2, low * across, high * across

    def scratch_bytes(self, count: int) -> int:
        # Numbers of 32 bits, and a scale and a zero for each value.
        return 12 * count
