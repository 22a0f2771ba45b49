"""Which block of numbers a scale belongs to, told by shapes. No torch import."""

from __future__ import annotations

from collections.abc import Sequence

from streamload.core.specs import Shape, TensorSpec, numel
from streamload.core.wording import listed
from streamload.decoding.scaled import PACKED, Scaled


class GridError(ValueError):
    """Scales of a shape that does not fit the numbers they are for."""


def scaled(
    name: str,
    numbers: TensorSpec,
    scales: TensorSpec,
    code: str,
    blocks: Sequence[tuple[int, int]] = (),
) -> TensorSpec:
    """The tensor of values that numbers and their scales make.

    Args:
        name: of the values.
        numbers: ``[..., rows, columns]`` as stored; what is packed lies along the columns.
        scales: one for each block.
        code: see ``Scaled``.
        blocks: the sizes that blocks may have, rows and columns of numbers; none where a scale is
            for the whole tensor, a matrix, a row or a column.

    Raises:
        GridError: the scales have another shape.
    """
    *outer, last = numbers.shape or (1,)
    shape = (*outer, last * PACKED.get(code, 1))
    rows, columns = shape[-2] if len(shape) > 1 else 1, shape[-1]
    matrices = shape[:-2]
    fitting = _blocks(matrices, rows, columns, scales.shape, blocks)
    if fitting is None:
        raise GridError(_misfit(numbers, shape, scales, blocks))
    if numel(scales.shape) == 1:  # one for all matrices
        rows, fitting = rows * numel(matrices), (max(rows * numel(matrices), 1), columns)
    encoding = Scaled(
        (numbers, scales), numbers.dtype, code=code, rows=rows, columns=columns, block=fitting
    )
    return TensorSpec(name, "F32", shape, numbers.file, encoding=encoding)


def _blocks(
    matrices: Shape, rows: int, columns: int, found: Shape, blocks: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    for down, across in blocks:
        if found == (*matrices, -(-rows // down), -(-columns // across)):
            return down, across
    if blocks:
        return None
    shapes = {
        (*matrices, 1, 1): (rows, columns),
        (*matrices, 1, columns): (rows, 1),
        (*matrices, rows): (1, columns),
        (*matrices, rows, 1): (1, columns),
    }
    if matrices:
        shapes.setdefault(matrices, (rows, columns))
    return (rows, columns) if numel(found) == 1 else shapes.get(found)


def _misfit(
    numbers: TensorSpec, shape: Shape, scales: TensorSpec, blocks: Sequence[tuple[int, int]]
) -> str:
    """Names both, and says which shapes would fit."""
    *matrices, rows, columns = shape if len(shape) > 1 else (1, *shape)
    wanted = [[*matrices, -(-rows // b[0]), -(-columns // b[1])] for b in blocks]
    ways = [
        f"{grid} (blocks of {b[0]} x {b[1]})" for grid, b in zip(wanted, blocks, strict=True)
    ] or [f"{[]} or [1] (one for all)", f"{[*matrices, rows, 1]} (one a row)"]
    return (
        f"{scales.name!r} has shape {list(scales.shape)}, but {numbers.name!r} of shape "
        f"{list(numbers.shape)} needs {listed(ways, separator=', or ')}"
    )
