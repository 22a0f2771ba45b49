"""Host memory straight from the system, which is given back the moment a tensor is let go.

What malloc hands out in pieces of some megabytes it keeps when they are freed, and small things
that live on between them keep it from ever giving them back. Where whole blocks of a model come
and go, that adds up to the model.
"""

from __future__ import annotations

import mmap
import sys

import torch

from streamload.engine.cpu import CpuLane
from streamload.planning.records import PlannedTensor
from streamload.sources.blocks import torch_dtype

__all__ = ["PagedCpuLane", "empty_pages"]

# Below, the pages that are not full would weigh more than what malloc keeps.
_LEAST_BYTES = 256 << 10


def empty_pages(
    shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor in host memory, its values not set; dense, contiguous without ``strides``."""
    count = 1
    for size in shape:
        count *= size
    nbytes = count * dtype.itemsize
    if nbytes < _LEAST_BYTES:
        flat = torch.empty(count, dtype=dtype, device="cpu")
    else:
        flat = torch.frombuffer(_anonymous(nbytes), dtype=dtype, count=count)
    return flat.view(shape) if strides is None else torch.as_strided(flat, shape, strides)


def _anonymous(nbytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    # Private, or it would count as shared memory.
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class PagedCpuLane(CpuLane):
    """The CPU lane for tensors that may be replaced as soon as they are complete."""

    def allocate(self, tensor: PlannedTensor) -> torch.Tensor:
        """See Lane."""
        return empty_pages(tensor.shape, torch_dtype(tensor.dtype), tensor.strides)
