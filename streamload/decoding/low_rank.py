"""A stored matrix and the product of two thin ones beside it, as LoRA has them. No torch import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from streamload.core.encoding import Encoding
from streamload.core.specs import numel
from streamload.decoding.overlaid import after

# A product of so many values is large enough to be fast, and small beside a chunk.
_AT_ONCE = 1 << 19

# Elements of A up to which it is kept where only columns of it are needed.
_KEPT = 1 << 21

# Places of the parts.
WEIGHT, INPUTS, OUTPUTS, MAGNITUDE, NORMS = range(5)


@dataclass(frozen=True)
class LowRank(Encoding):
    """W + scale x B A, by rows of W; with DoRA, each output is then given its magnitude.

    Its parts are W: ``matrices`` matrices of ``rows`` x ``columns`` one after the other; A
    ``[rank x experts, inputs]``: the rows of an expert follow each other; B
    ``[outputs, rank x experts]``: the experts of a rank follow each other (PEFT's layout); with
    DoRA the magnitude of each output, and the norms of W's columns if these are the outputs.
    Values are made in the dtype that the spec has, float32 or float64.

    Attributes:
        rows, columns: of one matrix.
        matrices: how many there are; the first is of ``expert``, and so on.
        rank: of one expert.
        experts: how many A and B are for; 1 without experts.
        scale: alpha / rank, or alpha / sqrt(rank).
        by_inputs: rows of W are inputs, columns are outputs (Conv1D, embeddings).
        expert: the first matrix' own.
        first_output: which row of B the first output of W has.
    """

    kind: ClassVar[str] = "low_rank"

    rows: int = 1
    columns: int = 1
    matrices: int = 1
    rank: int = 1
    experts: int = 1
    scale: float = 1.0
    by_inputs: bool = False
    expert: int = 0
    first_output: int = 0

    @property
    def has_magnitude(self) -> bool:
        return len(self.parts) > MAGNITUDE

    @property
    def words(self) -> str:
        name = "dora" if self.has_magnitude else "lora"
        return after(self.parts[WEIGHT], f"{name}(rank={self.rank}, scale={self.scale:.6g})")

    @property
    def quantum(self) -> int:
        # A power of two, as the rows of most other quanta are.
        return self.columns << max((_AT_ONCE // self.columns).bit_length() - 1, 0)

    @property
    def inputs(self) -> int:
        return self.rows if self.by_inputs else self.columns

    @property
    def outputs(self) -> int:
        return self.columns if self.by_inputs else self.rows

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The rows that values [start, stop) are: (matrix, its first row, its last row + 1)."""
        at, end = start // self.columns, stop // self.columns
        while at < end:
            matrix, first = divmod(at, self.rows)
            last = min(self.rows, first + end - at)
            yield matrix, first, last
            at += last - first

    @property
    def has_whole_inputs(self) -> bool:
        """True if an expert's A is kept as a whole from block to block."""
        return not self.by_inputs or self.rank * self.rows <= _KEPT

    def of_inputs(self, matrix: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Runs of A that rows [first, last) of a matrix need, in the order of ranks."""
        row = (self.expert + matrix) * self.rank
        if self.has_whole_inputs:
            yield row * self.inputs, (row + self.rank) * self.inputs
            return
        for at in range(row, row + self.rank):
            yield at * self.inputs + first, at * self.inputs + last

    def of_outputs(self, first: int, last: int) -> tuple[int, int]:
        """The run of B that rows [first, last) of a matrix need."""
        width = self.rank * self.experts
        if self.by_inputs:
            first, last = 0, self.columns
        return (self.first_output + first) * width, (self.first_output + last) * width

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        yield WEIGHT, start, stop
        for matrix, first, last in self.blocks(start, stop):
            for run in self.of_inputs(matrix, first, last):
                yield INPUTS, *run
            yield OUTPUTS, *self.of_outputs(first, last)
        for part in range(MAGNITUDE, len(self.parts)):
            yield part, 0, numel(self.parts[part].shape)

    def scratch_bytes(self, count: int) -> int:
        rows = min(count // self.columns, self.rows)
        # Both factors as they are multiplied.
        inputs = self.inputs if self.has_whole_inputs else rows
        factors = 8 * self.rank * (inputs + (self.columns if self.by_inputs else rows))
        # Where norms take a pass of their own, it works beside this one.
        return factors + (factors + 16 * count if len(self.parts) > NORMS else 0)
