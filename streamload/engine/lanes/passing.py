"""The CPU lane for tensors that come and go while a load is under way."""

from __future__ import annotations

import torch

from streamload.engine.lanes.cpu import CpuLane
from streamload.planning.records import PlannedTensor
from streamload.sources.blocks import torch_dtype
from streamload.system.pages import empty_pages

__all__ = ["PagedCpuLane"]


class PagedCpuLane(CpuLane):
    """The CPU lane for tensors that may be replaced as soon as they are complete."""

    def allocate(self, tensor: PlannedTensor) -> torch.Tensor:
        """See Lane."""
        return empty_pages(tensor.shape, torch_dtype(tensor.dtype), tensor.strides)
