"""The first use of what was loaded: every element read once, the same way for all loaders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from streamload.measuring.floor import BLOCK_BYTES, run_threads


def use_all(result: Any, *, workers: int) -> int:
    """Use every tensor of a module, a dict, or something that has a ``.model``.

    Returns their bytes, counting each tensor once; 0 for a result without tensors.
    """
    model = getattr(result, "model", result)
    if hasattr(model, "parameters"):
        tensors: Iterable[torch.Tensor] = [*model.parameters(), *model.buffers()]
    else:
        tensors = model.values() if hasattr(model, "values") else ()
    return use_tensors({id(tensor): tensor for tensor in tensors}.values(), workers=workers)


def use_tensors(tensors: Iterable[torch.Tensor], *, workers: int) -> int:
    """Read every element once; returns the tensors' bytes.

    Threads of its own take blocks in turn: torch's threads would wait for each other at every
    tensor, and on a busy machine that costs more than the reading.
    """
    tensors = list(tensors)
    blocks = iter([block for tensor in tensors for block in _blocks(tensor)])

    def work() -> None:
        with torch.inference_mode():
            for block in blocks:
                _read(block)

    run_threads(work, workers)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _blocks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views of about 4 MiB that lie together in memory."""
    if tensor.numel() == 0:
        return ()
    if tensor.dim() == 0:
        return (tensor,)
    strides = tensor.stride()
    outermost = max(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] > 1, strides[dim]))
    nbytes = tensor.numel() * tensor.element_size()
    rows = max(1, BLOCK_BYTES * tensor.shape[outermost] // nbytes)
    return torch.split(tensor.detach(), rows, outermost)


def _read(block: torch.Tensor) -> None:
    if block.dtype.itemsize == 1 and block.dtype.is_floating_point:
        block = block.view(torch.uint8)
    if block.is_floating_point() or block.is_complex():
        block.sum()
    else:
        block.amax()  # the sum of integers would make a wider copy of all first
