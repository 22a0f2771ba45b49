"""Which lane serves a device, which devices there are, and one lane over several devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from streamload.engine.chunks import Chunk, Part
from streamload.engine.lanes.base import Destinations, Lane, LaneWorker
from streamload.engine.lanes.cpu import CpuLane, PagedCpuLane
from streamload.engine.lanes.device import DeviceLane, PlainOps
from streamload.engine.lanes.ring import SLOT_BYTES
from streamload.planning.records import PlannedTensor
from streamload.sources.wrapping.reader import Reader

_LEAST_SLOT_BYTES = 64 << 10


def lane_for(devices: Iterable[str], *, chunk_bytes: int, passing: bool = False) -> Lane:
    """The lane for tensors that are planned for ``devices``; the CPU's if there are none.

    Call it from the thread whose current stream is to see the tensors.

    Args:
        devices: of all tensors.
        chunk_bytes: how much one read brings.
        passing: tensors may be let go during the load (``on_layer``).
    """
    lanes = {d: _lane(d, chunk_bytes, passing) for d in sorted(set(devices) or {"cpu"})}
    return DeviceLanes(lanes) if len(lanes) > 1 else next(iter(lanes.values()))


def _lane(device: str, chunk_bytes: int, passing: bool) -> Lane:
    kind = torch.device(device).type
    if kind == "cpu":
        return (PagedCpuLane if passing else CpuLane)(chunk_bytes=chunk_bytes)
    slot_bytes = min(max(chunk_bytes, _LEAST_SLOT_BYTES), SLOT_BYTES)
    if kind == "cuda":
        from streamload.engine.lanes.cuda import CudaOps

        return DeviceLane(CudaOps(device), slot_bytes=slot_bytes)
    return DeviceLane(PlainOps(device), slot_bytes=slot_bytes)


def unusable(device: str) -> str | None:
    """Why tensors cannot be loaded to ``device``, or None if they can; allocates nothing."""
    try:
        where = torch.device(device)
    except RuntimeError:
        return f"device {device!r} is not one that torch knows"
    reason = ""
    if where.type == "meta":
        reason = "tensors on it hold no values"
    elif where.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available():
            reason = "torch sees no CUDA device"
        elif where.index is not None and where.index >= count:
            reason = f"there are {count} CUDA devices, counted from 0"
    else:
        try:
            torch.empty(0, device=where)
        except (RuntimeError, AssertionError, ImportError) as error:
            reason = str(error).partition("\n")[0]
    return f"device {device!r} is not available here: {reason}" if reason else None


class DeviceLanes:
    """Sends each tensor and each block to the lane of its device.

    Args:
        lanes: by ``PlannedTensor.device``.
    """

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = lanes

    def allocate(self, tensor: PlannedTensor) -> torch.Tensor:
        return self._lanes[tensor.device].allocate(tensor)

    def worker(self) -> LaneWorker:
        return _Dispatcher(self._lanes)

    def finish(self) -> None:
        for lane in self._lanes.values():
            lane.finish()

    def room(self) -> Mapping[str, int]:
        return {
            device: free for lane in self._lanes.values() for device, free in lane.room().items()
        }

    def peak_bytes(self) -> int:
        return sum(lane.peak_bytes() for lane in self._lanes.values())


class _Dispatcher:
    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = lanes
        self._workers: dict[str, LaneWorker] = {}

    def carry(
        self, chunk: Chunk, stored: torch.dtype, read: Reader, destinations: Destinations
    ) -> None:
        """See LaneWorker; a block with parts on several devices is read once for each."""
        by_device: dict[str, list[Part]] = {}
        for part in chunk.parts:
            by_device.setdefault(destinations[part.target].device, []).append(part)
        for device, parts in by_device.items():
            if device not in self._workers:
                self._workers[device] = self._lanes[device].worker()
            self._workers[device].carry(
                replace(chunk, parts=tuple(parts)), stored, read, destinations
            )

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
