"""What a lane is: how blocks reach one kind of device. A lane never interprets a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from streamload.engine.chunks import Chunk
from streamload.planning.records import PlannedTensor

__all__ = ["NO_MEMORY", "Lane", "LaneWorker", "ReadElements", "Destination"]


# What a destination holds before it has memory, and after it was handed on.
NO_MEMORY = torch.empty(0, dtype=torch.uint8, device="cpu")


class ReadElements(Protocol):
    """Fills a writable buffer with the stored elements [start, stop) of one tensor.

    Attributes:
        held: all elements as a flat tensor in memory order, if they are in host memory already;
            never to be written to.
    """

    held: torch.Tensor | None

    def __call__(self, start: int, stop: int, buffer: memoryview, /) -> None:
        """Fill ``buffer``, which is the caller's throughout."""


@dataclass(slots=True)
class Destination:
    """One destination while it is written.

    Attributes:
        tensor: the destination, owned by the caller; strides as planned.
        device: as planned; says which lane writes it where there are several.
        is_fresh: nothing was ever written to its memory.
        overflows: finite stored values that became infinite by the cast, so far.
        touched: True once something may have been written.
    """

    tensor: torch.Tensor
    device: str = "cpu"
    is_fresh: bool = False
    overflows: int = 0
    touched: bool = False

    @classmethod
    def of(cls, planned: PlannedTensor) -> Destination:
        """One that gets its memory later."""
        return cls(NO_MEMORY, planned.device, is_fresh=planned.is_new)


class LaneWorker(Protocol):
    """The part of a lane that one thread owns, with its buffers."""

    def carry(
        self,
        chunk: Chunk,
        stored: torch.dtype,
        read: ReadElements,
        destinations: Sequence[Destination],
    ) -> None:
        """Read one block and write its parts; returns when the worker's buffers may be reused."""

    def close(self) -> None:
        """Wait for what is under way, and let the buffers go."""


class Lane(Protocol):
    """How tensors are made and written on a kind of device."""

    def allocate(self, tensor: PlannedTensor) -> torch.Tensor:
        """A new tensor of the planned shape, strides and dtype; its memory is not touched."""

    def worker(self) -> LaneWorker:
        """A worker for the calling thread."""

    def finish(self) -> None:
        """Wait until everything written can be used by the caller's current stream."""
