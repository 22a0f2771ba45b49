"""Numbers of few bits with scales: what is stored, and which scale is whose. No torch import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from streamload.core.encoding import Encoding

# How many values an element of the first part holds, where it is not one.
PACKED = {"fp4": 2, "int4": 2}


@dataclass(frozen=True)
class Scaled(Encoding):
    """Matrices of small numbers; each block of ``block`` rows and columns has one scale.

    Its parts are the numbers, row-major, and the scales ``[matrices, row blocks, column blocks]``;
    blocks at the lower and the right edge may be cut. A value is number x scale, in float32.

    Attributes:
        code: what a number is: a safetensors name (one number an element), or a key of PACKED.
        rows, columns: of one matrix; all matrices follow each other.
        block: rows and columns of numbers that share a scale.
    """

    kind: ClassVar[str] = "scaled"

    code: str = ""
    rows: int = 1
    columns: int = 1
    block: tuple[int, int] = (1, 1)

    @property
    def words(self) -> str:
        rows, columns = self.block
        name = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "int8"}.get(self.code, self.code)
        if columns >= self.columns:
            return f"{name} with a scale {'a tensor' if rows >= self.rows else 'a row'}"
        return f"{name} in blocks of {rows} x {columns}"

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of one matrix, downwards and across."""
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    @property
    def quantum(self) -> int:
        return self.columns

    def scale_row(self, row: int) -> int:
        """The row of scales that a row of numbers takes, both counted over all matrices."""
        matrix, inside = divmod(row, self.rows)
        return matrix * self.grid[0] + inside // self.block[0]

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        packed, across = PACKED.get(self.code, 1), self.grid[1]
        yield 0, start // packed, stop // packed
        first, last = start // self.columns, stop // self.columns
        yield 1, self.scale_row(first) * across, (self.scale_row(last - 1) + 1) * across

    def scratch_bytes(self, count: int) -> int:
        # 16-bit numbers, or 32-bit places in a table; and the scales of each row.
        return 4 * (count + count // self.columns * self.grid[1])
