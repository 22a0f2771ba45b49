"""Touching every byte of what was loaded, the same way for all loaders."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = ["tensors_of", "touch"]

TOUCH_BYTES = 4 << 20


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Every tensor of a module, a dict, or something that has a ``.model``; each once."""
    model = getattr(result, "model", result)
    if hasattr(model, "parameters"):
        found: Iterable[torch.Tensor] = [*model.parameters(), *model.buffers()]
    else:
        found = model.values()
    return list({id(tensor): tensor for tensor in found}.values())


def touch(tensors: Iterable[torch.Tensor], *, workers: int) -> int:
    """Reads every element once, the same way for all loaders; returns their bytes.

    Threads of its own take blocks in turn: torch's threads would wait for each other at every
    tensor, and on a busy machine that costs more than the reading.
    """
    tensors = list(tensors)
    blocks: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    for tensor in tensors:
        for block in _blocks(tensor):
            blocks.put(block)

    def work() -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            while True:
                try:
                    _read(blocks.get_nowait())
                except queue.Empty:
                    return

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    if not blocks.empty():
        raise RuntimeError("not everything could be touched")
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
    rows = max(1, TOUCH_BYTES * tensor.shape[outermost] // nbytes)
    return torch.split(tensor.detach(), rows, outermost)


def _read(block: torch.Tensor) -> None:
    if block.dtype.itemsize == 1 and block.dtype.is_floating_point:
        block = block.view(torch.uint8)
    if block.is_floating_point() or block.is_complex():
        block.sum()
    else:
        block.amax()  # the sum of integers would make a wider copy of all first
