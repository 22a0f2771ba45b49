"""Which block of numbers a scale belongs to, told by shapes. No torch import."""

from __future__ import annotations

from collections.abc import Sequence

from streamload.core.specs import Shape, TensorSpec, numel
from streamload.core.wording import listed
from streamload.decoding.scaled import Scaled, packed

# What scales may be stored as; bytes are E8M0.
SCALES = ("F32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "U8")


class GridError(ValueError):
    """Scales that do not fit the numbers they are for, or a configuration that makes no sense."""


def scaled(
    name: str,
    numbers: TensorSpec,
    scales: TensorSpec,
    code: str,
    blocks: Sequence[tuple[int, int]] = (),
    *,
    zeros: TensorSpec | None = None,
    zeros_packed: int = 1,
    overall: TensorSpec | None = None,
    is_divisor: bool = False,
    factor: float = 1.0,
) -> TensorSpec:
    """The tensor of values that numbers and their scales make.

    Args:
        name: of the values.
        numbers: ``[..., rows, columns]`` as stored; what is packed lies along the columns.
        scales: one for each block.
        code: see ``Scaled``.
        blocks: the sizes that blocks may have, rows and columns of numbers; none where a scale is
            for the whole tensor, a matrix, a row or a column.
        zeros: one for each scale, if there are any.
        zeros_packed: see ``Scaled``.
        overall: the scale of scales.
        is_divisor: see ``Scaled``.
        factor: see ``Scaled``.

    Raises:
        GridError: scales or zeros have another shape or dtype.
    """
    if scales.dtype not in SCALES:
        raise GridError(f"{scales.name!r} is {scales.dtype}, which a scale cannot be")
    *outer, last = numbers.shape or (1,)
    shape = (*outer, last * packed(code, numbers.dtype))
    rows, columns = shape[-2] if len(shape) > 1 else 1, shape[-1]
    matrices = shape[:-2]
    block = _block(matrices, rows, columns, scales.shape, blocks)
    if block is None:
        raise GridError(_misfit(numbers, shape, scales, blocks))
    if numel(scales.shape) == 1:  # one for all matrices
        rows *= numel(matrices)
        block = (max(rows, 1), max(columns, 1))
    parts = [numbers, scales]
    for extra in (zeros, overall):
        parts += [] if extra is None else [extra]
    encoding = Scaled(
        tuple(parts),
        numbers.dtype,
        code=code,
        rows=rows,
        columns=columns,
        block=block,
        zeros=-1 if zeros is None else 2,
        zeros_packed=zeros_packed,
        overall=-1 if overall is None else len(parts) - 1,
        is_divisor=is_divisor,
        factor=factor,
    )
    if zeros is not None:
        down, across = encoding.grid
        needed = -(-down * numel(matrices) // zeros_packed) * across
        if numel(zeros.shape) != needed or zeros.shape[-1:] != scales.shape[-1:]:
            raise GridError(
                f"{zeros.name!r} has shape {list(zeros.shape)}, which does not fit the scales' "
                f"{list(scales.shape)}"
            )
    if overall is not None and (numel(overall.shape) != 1 or overall.dtype not in SCALES[:3]):
        text = f"{overall.name!r} is {overall.dtype} {list(overall.shape)}"
        raise GridError(f"{text}, but one number is needed")
    return TensorSpec(name, "F32", shape, numbers.file, encoding=encoding)


def _block(
    matrices: Shape, rows: int, columns: int, found: Shape, blocks: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """The rows and columns that share a scale, or None if none fit."""
    for down, across in blocks:
        if found == (*matrices, -(-rows // down), -(-columns // across)):
            return down, across
    if blocks:
        return None
    shapes = {
        (*matrices, rows, 1): (1, columns),
        (*matrices, rows): (1, columns),
        (*matrices, 1, columns): (rows, 1),
        (*matrices, 1, 1): (rows, columns),
    }
    if matrices:
        shapes.setdefault(matrices, (rows, columns))
    return (rows, columns) if numel(found) == 1 else shapes.get(found)


def _misfit(
    numbers: TensorSpec, shape: Shape, scales: TensorSpec, blocks: Sequence[tuple[int, int]]
) -> str:
    """Names both, and says which shapes would fit."""
    *matrices, rows, columns = shape if len(shape) > 1 else (1, *shape)
    ways = [
        f"{[*matrices, -(-rows // down), -(-columns // across)]} (blocks of {down} x {across})"
        for down, across in blocks
    ] or ["[] or [1] (one for all)", f"{[*matrices, rows, 1]} (one for each row)"]
    return (
        f"{scales.name!r} has shape {list(scales.shape)}, but {numbers.name!r} of shape "
        f"{list(numbers.shape)} needs {listed(ways, separator=', or ')}"
    )


def expect(
    spec: TensorSpec, dtypes: Sequence[str], shape: Shape, why: str, *, is_flat: bool = False
) -> None:
    """Raise GridError if a tensor is of another dtype or shape than what it belongs to needs.

    Args:
        spec: the tensor.
        shape: what it must have.
        dtypes: what it may be, the usual one first.
        why: what needs it so.
        is_flat: how its elements are shaped says nothing.
    """
    found = (numel(spec.shape),) if is_flat else spec.shape
    if spec.dtype not in dtypes or found != shape:
        raise GridError(
            f"{spec.name!r} is {spec.dtype} {list(spec.shape)}, but {why} needs "
            f"{dtypes[0]} {list(shape)}"
        )


def size(found: object, what: str) -> int:
    """A whole number from a configuration.

    Raises:
        GridError: it is none of at least 1.
    """
    if type(found) is not int or not 1 <= found < 1 << 31:
        raise GridError(f"{what} must be a whole number of at least 1, not {found!r:.60}")
    return found


def pair(found: object, what: str) -> list[tuple[int, int]]:
    """The configured size of blocks, or nothing where there is none.

    Raises:
        GridError: it is no pair of whole numbers.
    """
    if found is None:
        return []
    if not isinstance(found, (list, tuple)) or len(found) != 2:
        raise GridError(f"{what} must be two whole numbers, not {found!r:.60}")
    return [(size(found[0], what), size(found[1], what))]
