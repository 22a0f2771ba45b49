"""CUDA: pinned host memory, side streams, events, and what there is of its memory."""

from __future__ import annotations

import torch
from torch import Tensor

from streamload.engine.chunks import Part
from streamload.engine.lanes.device import empty_on, scatter
from streamload.engine.lanes.ring import Event, Stream
from streamload.planning.records import PlannedTensor


class CudaOps:
    """See DeviceOps.

    Args:
        device: ``"cuda"`` is the current one, which is settled here.
    """

    def __init__(self, device: str) -> None:
        index = torch.device(device).index
        self.device = device
        self._index = torch.cuda.current_device() if index is None else index
        self._device = f"cuda:{self._index}"

    def free_bytes(self) -> int | None:
        """Blocks that torch keeps for later count as free."""
        free, _ = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + kept

    def marks(self) -> tuple[int, int]:
        """Torch's own, which are left as they are.

        So if something earlier in the process needed more than this load, its peak is what was
        allocated at its end: a lower bound, short by staging.
        """
        device = self._device
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)

    def host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def scratch(self, nbytes: int, stream: Stream) -> Tensor:
        """Memory that belongs to ``stream``: freed, it is given out again in its order."""
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def counter(self, stream: Stream) -> Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros((), dtype=torch.int64, device=self._device)

    def allocate(self, tensor: PlannedTensor) -> Tensor:
        return empty_on(tensor, self._device)

    def stream(self) -> Stream:
        return torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._index)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Asynchronous, since the source is pinned."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def scatter(
        self, source: Tensor, part: Part, target: Tensor, lost: Tensor | None, stream: Stream
    ) -> None:
        """One kernel casts and turns; two more count, where the cast may overflow."""
        with torch.cuda.stream(stream):
            scatter(source, part, target, lost)

    def record(self, stream: Stream) -> Event:
        """One that a waiting host thread sleeps on rather than spins."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def synchronize(self, event: Event) -> None:
        """Lets other Python threads run meanwhile."""
        event.synchronize()
