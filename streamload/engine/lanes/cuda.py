"""CUDA: pinned host memory, side streams, events; and what there is of devices and memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from streamload.engine.chunks import Part
from streamload.engine.lanes.device import empty_on, scatter
from streamload.engine.lanes.ring import Event, Stream
from streamload.planning.records import PlannedTensor

__all__ = ["CudaMeter", "CudaOps", "free_bytes"]


class CudaOps:
    """See DeviceOps.

    Args:
        device: ``"cuda"`` is the current one, which is settled here.
    """

    def __init__(self, device: str) -> None:
        index = torch.device(device).index
        self._index = torch.cuda.current_device() if index is None else index
        self._device = f"cuda:{self._index}"

    def host(self, nbytes: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def scratch(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """Memory that belongs to ``stream``: freed, it is given out again in its order."""
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def counter(self, stream: Stream) -> torch.Tensor:
        """Set to zero on ``stream``."""
        with torch.cuda.stream(stream):
            return torch.zeros((), dtype=torch.int64, device=self._device)

    def allocate(self, tensor: PlannedTensor) -> torch.Tensor:
        """Of the caller's current stream."""
        return empty_on(tensor, self._device)

    def stream(self) -> Stream:
        """From torch's pool."""
        return torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]

    def current(self) -> Stream:
        """Of this device."""
        return torch.cuda.current_stream(self._index)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Asynchronous, since the source is pinned."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def scatter(
        self,
        source: torch.Tensor,
        part: Part,
        target: torch.Tensor,
        lost: torch.Tensor | None,
        stream: Stream,
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
        """On the device."""
        stream.wait_event(event)

    def synchronize(self, event: Event) -> None:
        """Lets other Python threads run meanwhile."""
        event.synchronize()


def free_bytes(device: str) -> int:
    """What can still be allocated on a CUDA device, torch's own cached blocks included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class CudaMeter:
    """How much device memory torch had allocated at most, over what it had at the start.

    torch's own marks are left as they are. So if something earlier in the process needed more
    than this load, the peak is what was allocated at its end: a lower bound, short by staging.

    Args:
        devices: names of any devices; only CUDA ones are looked at.
    """

    def __init__(self, devices: Iterable[str]) -> None:
        self._devices = sorted({d for d in devices if d.partition(":")[0] == "cuda"})
        self._start = {d: self._marks(d) for d in self._devices}

    def peak_bytes(self) -> int:
        """Over all devices together; 0 if there is none."""
        total = 0
        for device, (held, high) in self._start.items():
            now_held, now_high = self._marks(device)
            total += max((now_high if now_high > high else now_held) - held, 0)
        return total

    @staticmethod
    def _marks(device: str) -> tuple[int, int]:
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
