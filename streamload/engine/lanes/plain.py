"""Any device torch knows, by copies that the host waits for (MPS, XPU and others)."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from streamload.core.dtypes import BY_NAME
from streamload.engine.lanes.moves import scatter
from streamload.engine.lanes.ring import Event, Move, Stream
from streamload.planning.records import PlannedTensor
from streamload.sources.blocks import torch_dtype


class PlainOps:
    """See DeviceOps.

    Casts are made in host memory, so that the device needs to know the target's dtype only. Such
    devices are not made to be written from several threads: one at a time does so, and counts.

    Args:
        device: as torch names it.
    """

    stages = False

    def __init__(self, device: str) -> None:
        self.device = device
        self._alone = threading.Lock()

    def bind(self) -> None:
        """Every call names the device."""

    def free_bytes(self) -> int | None:
        return None

    def marks(self) -> tuple[int, int]:
        return 0, 0

    def host(self, nbytes: int) -> Tensor:
        return self.pageable(nbytes)

    def pageable(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def scratch(self, nbytes: int, stream: Stream) -> Tensor:
        del stream
        return self.pageable(nbytes)

    def counters(self, count: int, stream: Stream) -> Tensor:
        del stream  # on the host, where the staging is
        return torch.zeros(count, dtype=torch.int64, device="cpu")

    def reserve(self, sizes: Sequence[int]) -> None:
        """Left to torch."""

    def allocate(self, tensor: PlannedTensor) -> Tensor:
        return empty_on(tensor, self.device)

    def streams(self) -> tuple[Stream, Stream]:
        """There is but one order."""
        return None, None

    def current(self) -> Stream:
        """There is but one order."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        del stream
        with self._alone:
            target.copy_(source)

    def scatter(self, moves: Sequence[Move], stream: Stream) -> None:
        del stream
        with self._alone:
            for move in moves:
                scatter(move)

    def record(self, stream: Stream) -> Event:
        """Nothing is under way."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing is under way."""

    def synchronize(self, event: Event) -> None:
        """Nothing is under way."""


def empty_on(tensor: PlannedTensor, device: str) -> Tensor:
    """Memory for a planned tensor, its values not set."""
    assert BY_NAME[tensor.dtype].torch_name is not None, "planning refuses such dtypes"
    return torch.empty_strided(
        tensor.shape, tensor.strides, dtype=torch_dtype(tensor.dtype), device=device
    )
