"""Places carried out with torch alone, to be compared with what they were traced from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from streamload.hf.tracing import Places, Traced
from streamload.mapping.applying import apply
from streamload.mapping.layout import Layout


def carried_out(code: Callable[..., Tensor | Sequence[Tensor]], *values: Tensor) -> list[Tensor]:
    """What the places of ``code`` give for ``values``."""
    strides = [v.stride() for v in values]
    wholes = [Layout.whole(n, tuple(v.shape), v.stride()) for n, v in enumerate(values)]
    made = code(*(Traced(w, v.dtype) for w, v in zip(wholes, values, strict=True)))
    traced = [made] if isinstance(made, Tensor) else list(made)
    assert all(isinstance(one, Traced) for one in traced)
    layouts = tuple(one.layout_of for one in traced)  # type: ignore[attr-defined]
    shapes = [tuple(v.shape) for v in values]
    layouts = apply(Places(layouts, "made"), shapes, strides, [None] * len(layouts))
    results = []
    for layout in layouts:
        target = torch.full(layout.shape, -1.0)
        for copy in layout.copies([str(n) for n in range(len(values))]):
            source = values[int(copy.stored_name)]
            taken = source.as_strided(
                copy.shape, copy.source_strides, source.storage_offset() + copy.source_offset
            )
            target.as_strided(copy.shape, copy.target_strides, copy.target_offset).copy_(taken)
        results.append(target)
    return results
