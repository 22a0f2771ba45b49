"""The decoder of ``Pairs``."""

from __future__ import annotations

import torch

from streamload.decoding.pairs import Pairs
from streamload.decoding.scratch import Parts


def decode(encoding: Pairs, parts: Parts, start: int, stop: int, out: torch.Tensor) -> None:
    """See ``decoding.registry.Decoder``."""
    half, columns = encoding.head // 2, encoding.columns
    stored = parts.read(0, start, stop).view(-1, half, 2, columns)
    out.view(-1, 2, half, columns).copy_(stored.transpose(1, 2))
