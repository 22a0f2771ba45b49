"""Makes tensors that an adapter replaces, adds to, or replaces rows of."""

from __future__ import annotations

import torch

from streamload.decoding.overlaid import Added, Replaced, RowsReplaced
from streamload.decoding.scratch import Parts


def decode(
    encoding: Replaced | Added | RowsReplaced,
    parts: Parts,
    start: int,
    stop: int,
    out: torch.Tensor,
    /,
) -> None:
    """See ``registry.Decoder``; ``out`` has the dtype of the values."""
    out.copy_(parts.read(0, start, stop))
    if isinstance(encoding, Added):
        out.add_(parts.read(1, start, stop).to(out.dtype), alpha=encoding.scale)
    elif isinstance(encoding, RowsReplaced):
        first, last = start // encoding.columns, stop // encoding.columns
        rows = out.view(-1, encoding.columns)
        for at, row in enumerate(encoding.indices):
            if first <= row < last:
                rows[row - first].copy_(parts.whole(1).view(-1, encoding.columns)[at])
