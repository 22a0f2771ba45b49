"""Makes W + scale x B A by blocks of rows, in one product each; and DoRA's norms."""

from __future__ import annotations

from collections.abc import Callable

import torch

from streamload.decoding.low_rank import INPUTS, MAGNITUDE, NORMS, OUTPUTS, WEIGHT, LowRank
from streamload.decoding.scratch import Parts


def decode(encoding: LowRank, parts: Parts, start: int, stop: int, out: torch.Tensor, /) -> None:
    """See ``registry.Decoder``; ``out`` is float32 or float64, as the products are."""
    out.copy_(parts.read(WEIGHT, start, stop))
    values = out.view(-1, encoding.columns)
    at = 0
    for matrix, first, last in encoding.blocks(start, stop):
        block = values[at : at + last - first]
        _add_product(block, *_factors(encoding, parts, matrix, first, last, out.dtype), encoding)
        if encoding.has_magnitude:
            _give_magnitude(block, encoding, parts, first, last)
        at += last - first


def _factors(
    encoding: LowRank, parts: Parts, matrix: int, first: int, last: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What of B and A makes rows [first, last) of a matrix: [outputs, rank], [rank, inputs].

    What is the same for all rows is kept by the thread from one block to the next.
    """
    scratch, rank = parts.scratch, encoding.rank

    def inputs() -> torch.Tensor:
        runs = [*encoding.of_inputs(matrix, first, last)]
        made = scratch.elements("inputs", sum(stop - start for start, stop in runs), dtype)
        at = 0
        for start, stop in runs:
            made[at : at + stop - start].copy_(parts.read(INPUTS, start, stop))
            at += stop - start
        return made.view(rank, -1)

    def outputs() -> torch.Tensor:
        stored = parts.read(OUTPUTS, *encoding.of_outputs(first, last))
        stored = stored.view(-1, rank, encoding.experts)
        made = scratch.elements("outputs", stored.shape[0] * rank, dtype).view(-1, rank)
        return made.copy_(stored[:, :, encoding.expert + matrix])

    is_kept = encoding.has_whole_inputs, encoding.by_inputs
    keys = [
        (encoding.parts[part].name, encoding.expert + matrix, encoding.first_output, dtype, rows)
        for part, kept in zip((INPUTS, OUTPUTS), is_kept, strict=True)
        for rows in [None if kept else (first, last)]
    ]
    right = scratch.kept("inputs", keys[0], inputs)
    if encoding.by_inputs and encoding.has_whole_inputs:
        right = right[:, first:last]
    return scratch.kept("outputs", keys[1], outputs), right


def _add_product(
    block: torch.Tensor, outputs: torch.Tensor, inputs: torch.Tensor, encoding: LowRank
) -> None:
    """Add scale x B A, or its transpose."""
    left, right = (inputs.t(), outputs.t()) if encoding.by_inputs else (outputs, inputs)
    if block.dtype == torch.float32 and not _are_products_exact():
        product = (left.double() @ right.double()).mul_(encoding.scale)
        block.copy_(product.add_(block))
        return
    block.addmm_(left, right, alpha=encoding.scale)


def _are_products_exact() -> bool:
    """False if the program allows float32 products of fewer bits than float32 has."""
    mkldnn = torch.backends.mkldnn
    for backend in (getattr(mkldnn, "matmul", None), mkldnn, torch.backends):
        allowed = getattr(backend, "fp32_precision", None)  # what holds for the next one is "none"
        if allowed not in (None, "none"):
            return bool(allowed == "ieee")
    if hasattr(torch.backends, "fp32_precision"):
        return True
    return torch.get_float32_matmul_precision() == "highest"


def _give_magnitude(
    block: torch.Tensor, encoding: LowRank, parts: Parts, first: int, last: int
) -> None:
    """DoRA: each output's weights are scaled to its magnitude, by their norm over the inputs."""
    magnitude = parts.whole(MAGNITUDE).to(block.dtype)
    if encoding.by_inputs:
        block.mul_(magnitude / parts.whole(NORMS))
        return
    norms = torch.linalg.vector_norm(block, dim=1)
    block.mul_((magnitude[first:last] / norms).unsqueeze(1))


def column_norms(
    read: Callable[[int, int, torch.Tensor], None], rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """The norms of a matrix' columns, [columns]; read by blocks of rows, summed in float64.

    Args:
        read: fills a flat tensor of ``dtype`` with the elements [start, stop).
        rows: of the matrix.
        columns: of the matrix.
        dtype: of its elements, and of the norms.
    """
    step = max((1 << 19) // columns, 1)
    room = torch.empty(min(step, rows) * columns, dtype=dtype)
    sums = torch.zeros(columns, dtype=torch.float64)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        block = room[: (last - first) * columns]
        read(first * columns, last * columns, block)
        sums += torch.linalg.vector_norm(
            block.view(-1, columns), dim=0, dtype=torch.float64
        ).square_()
    return sums.sqrt_().to(dtype)
