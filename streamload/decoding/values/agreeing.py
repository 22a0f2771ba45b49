"""Reads what several files hold alike, and refuses it where they differ."""

from __future__ import annotations

import torch

from streamload.core.errors import CheckpointError
from streamload.core.pieces import Agreeing
from streamload.core.specs import TensorSpec
from streamload.core.wording import printable
from streamload.decoding.scratch import Parts


def decode(encoding: Agreeing, parts: Parts, start: int, stop: int, out: torch.Tensor, /) -> None:
    """The first copy's values; the others are compared with them.

    Raises:
        CheckpointError: one differs.
    """
    parts.fill(0, start, stop, out)
    for at in range(1, len(encoding.parts)):
        refuse_difference(encoding.parts[0], out, encoding.parts[at], parts.read(at, start, stop))


def refuse_difference(
    first: TensorSpec, values: torch.Tensor, other: TensorSpec, again: torch.Tensor
) -> None:
    """Compare two copies of one tensor, bit by bit.

    Raises:
        CheckpointError: they differ.
    """
    flat, copy = values.reshape(-1), again.reshape(-1)
    if torch.equal(flat.view(torch.uint8), copy.view(torch.uint8)):
        return
    largest = ""
    if flat.dtype.is_floating_point:
        largest = f" (by up to {float((flat.double() - copy.double()).abs().max()):.3g})"
    raise CheckpointError(
        f"must be the same in all parts, but {printable(other.file)} has other values than "
        f"{printable(first.file)}{largest}",
        path=first.file,
        tensor=first.name,
    )
