"""Numbers of few bits with scales: what is stored, and which scale is whose. No torch import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from streamload.core.dtypes import BY_NAME
from streamload.core.encoding import Encoding
from streamload.core.specs import numel

# The 16 values of the 4-bit float E2M1 (OCP Microscaling Formats, table 4).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# What 4 bits stand for; the first number of a byte is in its lower ones.
NIBBLES: dict[str, tuple[float, ...]] = {
    "fp4": (*_E2M1, *(-value for value in _E2M1)),
    "int4": tuple(float(n - 8) for n in range(16)),
    "uint4": tuple(float(n) for n in range(16)),
}
_NAMES = {"F8": "fp8", "I8": "int8", "U8": "int8", "uint4": "int4", "biased8": "int8"}


def packed(code: str, dtype: str) -> int:
    """How many numbers an element holds."""
    bits = 4 if code in NIBBLES or code == "table4" else 8
    return BY_NAME[dtype].bits // bits


@dataclass(frozen=True)
class Scaled(Encoding):
    """Matrices of small numbers; each block of ``block`` rows and columns has one scale.

    Its parts are the numbers, row-major, and the scales ``[matrices, row blocks, column blocks]``;
    blocks at the lower and the right edge may be cut. A value is (number - zero) x scale, in
    float32.

    Attributes:
        code: what a number is: a safetensors name; a key of NIBBLES; ``"biased8"``, a byte that
            is 128 too large; ``"table4"`` and ``"table8"``, places in a part that lists values,
            the first of a byte in its upper bits. Several of them may share an element, along
            the columns.
        rows, columns: of one matrix; all matrices follow each other.
        block: rows and columns of numbers that share a scale.
        zeros: the part that has a zero for each block, -1 if none has; ``zeros_packed`` of 4 bits
            share an element, along the rows.
        overall: the part with the one scale of all scales, -1 if none has; scales are divided by
            it if ``is_divisor``.
        table: the part that lists values, -1 if none does.
        factor: what each product is multiplied by at last.
        offset: what is added then.
    """

    kind: ClassVar[str] = "scaled"

    code: str = ""
    rows: int = 1
    columns: int = 1
    block: tuple[int, int] = (1, 1)
    zeros: int = -1
    zeros_packed: int = 1
    overall: int = -1
    is_divisor: bool = False
    table: int = -1
    factor: float = 1.0
    offset: float = 0.0

    @property
    def words(self) -> str:
        rows, columns = self.block
        name = _NAMES.get(self.code) or _NAMES.get(self.code[:2], self.code)
        if self.table >= 0:
            values = numel(self.parts[self.table].shape)
            return f"numbers of a list of {values} in blocks of {columns}"
        if self.zeros >= 0:
            name = f"{name} with zeros"
        if columns >= self.columns:
            return f"{name}, a scale for {'all' if rows >= self.rows else 'each row'}"
        return f"{name} in blocks of {rows} x {columns}"

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of one matrix, downwards and across."""
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    @property
    def quantum(self) -> int:
        return max(self.columns, 1)

    @property
    def per_element(self) -> int:
        """Numbers in an element of the first part."""
        return packed(self.code, self.parts[0].dtype)

    def scale_row(self, row: int) -> int:
        """The row of scales that a row of numbers takes, both counted over all matrices."""
        matrix, inside = divmod(row, self.rows)
        return matrix * self.grid[0] + inside // self.block[0]

    def rows_of_scales(self, first: int, last: int) -> list[int]:
        """How many of the rows of numbers [first, last) each of their rows of scales is for."""
        counts, row = [], first
        while row < last:
            inside = row % self.rows
            end = min(inside // self.block[0] * self.block[0] + self.block[0], self.rows)
            counts.append(min(end - inside, last - row))
            row += counts[-1]
        return counts

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        across = self.grid[1]
        yield 0, start // self.per_element, stop // self.per_element
        first = self.scale_row(start // self.columns)
        last = self.scale_row(stop // self.columns - 1) + 1
        yield 1, first * across, last * across
        if self.zeros >= 0:
            at, end = first // self.zeros_packed, (last - 1) // self.zeros_packed + 1
            yield self.zeros, at * across, end * across
        if self.overall >= 0:
            yield self.overall, 0, 1
        if self.table >= 0:
            yield self.table, 0, numel(self.parts[self.table].shape)

    def scratch_bytes(self, count: int) -> int:
        # 16-bit numbers or 32-bit places in a table, and what each row multiplies by.
        return 4 * (count + 2 * (count // self.columns) * self.grid[1])
