"""One lane over several devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from streamload.decoding.scratch import Scratch
from streamload.engine.chunks import Chunk, Part
from streamload.engine.jobs import Job
from streamload.engine.lanes.base import Destinations, Lane, LaneWorker
from streamload.planning.records import PlannedTensor
from streamload.sources.base import Source
from streamload.sources.wrapping.reader import Reader


class DeviceLanes:
    """Sends each tensor and each block to the lane of its device.

    Args:
        lanes: by ``PlannedTensor.device``.
    """

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = lanes
        sizes = [lane.batch_bytes for lane in lanes.values() if lane.batch_bytes]
        self.batch_bytes = min(sizes, default=0)

    @contextmanager
    def opening(self, tensors: Sequence[PlannedTensor]) -> Iterator[None]:
        with ExitStack() as stack:
            for device, lane in self._lanes.items():
                stack.enter_context(lane.opening([t for t in tensors if t.device == device]))
            yield

    def allocate(self, tensor: PlannedTensor) -> torch.Tensor:
        return self._lanes[tensor.device].allocate(tensor)

    def worker(self) -> LaneWorker:
        return _Dispatcher(self._lanes)

    def settle(self) -> None:
        for lane in self._lanes.values():
            lane.settle()

    def finish(self) -> None:
        for lane in self._lanes.values():
            lane.finish()

    def notices(self) -> tuple[str, ...]:
        return tuple(text for lane in self._lanes.values() for text in lane.notices())

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
        self.scratch = Scratch()

    def carry(
        self, chunk: Chunk, stored: torch.dtype, read: Reader, destinations: Destinations
    ) -> None:
        """See LaneWorker; a block with parts on several devices is read once for each."""
        by_device: dict[str, list[Part]] = {}
        for part in chunk.parts:
            by_device.setdefault(destinations[part.target].device, []).append(part)
        for device, parts in by_device.items():
            own = chunk._replace(parts=tuple(parts))
            self._worker(device).carry(own, stored, read, destinations)

    def carry_joined(self, job: Job, source: Source, destinations: Destinations) -> None:
        """See LaneWorker; only what goes to one device is joined."""
        device = destinations[job.chunks[0].parts[0].target].device
        self._worker(device).carry_joined(job, source, destinations)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    def _worker(self, device: str) -> LaneWorker:
        if device not in self._workers:
            self._workers[device] = self._lanes[device].worker()
        return self._workers[device]
