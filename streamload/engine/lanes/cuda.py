"""CUDA: pinned host memory, side streams, events, and what there is of its memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from streamload.engine.lanes.moves import scatter_all
from streamload.engine.lanes.plain import empty_on
from streamload.engine.lanes.ring import Event, Move, Stream
from streamload.planning.records import PlannedTensor

# Memory that was freed on a stream is given out again on that one only: with streams of its own,
# every load would leave its staging behind. These are as many as there are devices, and stay.
_STREAMS: dict[int, tuple[Stream, Stream]] = {}
_LOCK = threading.Lock()
# Smaller tensors share segments of torch's own, which asks for 2 MiB at a time.
_LEAST_RESERVED_BYTES = 1 << 20


class CudaOps:
    """See DeviceOps.

    Args:
        device: with its number.
    """

    stages = True

    def __init__(self, device: str) -> None:
        index = torch.device(device).index
        assert index is not None, "devices are settled before"
        self.device = device
        self._index = index

    def bind(self) -> None:
        """Else the thread works from device 0, and what it calls may make a context there."""
        if torch.cuda.current_device() != self._index:
            torch.cuda.set_device(self._index)

    def free_bytes(self) -> int | None:
        """Blocks that torch keeps for later count as free."""
        free, _ = torch.cuda.mem_get_info(self._index)
        return free + self._kept_bytes()

    def marks(self) -> tuple[int, int]:
        """Torch's own, which are left as they are.

        So if something earlier in the process needed more than this load, its peak is what was
        allocated at its end: a lower bound, short by staging.
        """
        device = self._index
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)

    def host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def pageable(self, nbytes: int) -> Tensor:
        """CUDA copies such memory aside before it returns, so that events hold as for pinned."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def scratch(self, nbytes: int, stream: Stream) -> Tensor:
        """Memory that belongs to ``stream``: freed, it is given out again in its order."""
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def counters(self, count: int, stream: Stream) -> Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(count, dtype=torch.int64, device=self.device)

    def reserve(self, sizes: Sequence[int]) -> None:
        """One request to the driver instead of one for each tensor.

        What is freed here stays with torch's allocator, which cuts the tensors from it. Each is a
        block of its own, and can be freed and used again alone.
        """
        nbytes = sum(-(-n // 512) * 512 for n in sizes if n > _LEAST_RESERVED_BYTES)
        if nbytes <= self._kept_bytes():
            return
        try:
            torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            return  # in pieces it may still fit

    def allocate(self, tensor: PlannedTensor) -> Tensor:
        return empty_on(tensor, self.device)

    def streams(self) -> tuple[Stream, Stream]:
        with _LOCK:
            if self._index not in _STREAMS:
                made = [torch.cuda.Stream(self._index) for _ in range(2)]  # type: ignore[no-untyped-call]
                _STREAMS[self._index] = made[0], made[1]
            return _STREAMS[self._index]

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._index)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Asynchronous where the source is pinned."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def scatter(self, moves: Sequence[Move], stream: Stream) -> None:
        """One kernel casts and turns; two more count, where the cast may overflow."""
        with torch.cuda.stream(stream):
            scatter_all(moves)

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

    def _kept_bytes(self) -> int:
        device = self._index
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
