"""Puts a run of a tensor's elements together out of the pieces that hold them."""

from __future__ import annotations

import torch

from streamload.core.pieces import Pieces
from streamload.decoding.scratch import Parts


def decode(encoding: Pieces, parts: Parts, start: int, stop: int, out: torch.Tensor, /) -> None:
    """What lies in a row is read straight to its place; columns go by way of a buffer."""
    for portion in encoding.portions(start, stop):
        if portion.is_run:
            end = portion.offset + portion.stop - portion.start
            parts.fill(portion.piece, portion.start, portion.stop, out[portion.offset : end])
            continue
        values = parts.read(portion.piece, portion.start, portion.stop).view(portion.shape)
        place = torch.as_strided(
            out, portion.shape, portion.strides, out.storage_offset() + portion.offset
        )
        place.copy_(values)
