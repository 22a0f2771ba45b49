"""What a lane is: how blocks reach one kind of device. A lane never interprets a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from streamload.decoding.scratch import Scratch
from streamload.engine.chunks import Chunk
from streamload.engine.jobs import Job
from streamload.planning.records import PlannedTensor
from streamload.sources.base import Source
from streamload.sources.wrapping.reader import Reader

# What a destination holds before it has memory, and after it was handed on.
NO_MEMORY = torch.empty(0, dtype=torch.uint8, device="cpu")


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

    tensor: torch.Tensor = NO_MEMORY
    device: str = "cpu"
    is_fresh: bool = False
    overflows: int = 0
    touched: bool = False


Destinations: TypeAlias = Sequence[Destination]


class LaneWorker(Protocol):
    """The part of a lane that one thread owns, with its buffers.

    Attributes:
        scratch: what decoding uses again and again; it lives as long as the worker does.
    """

    scratch: Scratch

    def carry(
        self, chunk: Chunk, stored: torch.dtype, read: Reader, destinations: Destinations
    ) -> None:
        """Read one block and write its parts; returns when the worker's buffers may be reused."""

    def carry_joined(self, job: Job, source: Source, destinations: Destinations) -> None:
        """The same for a job that others were joined to; only lanes with ``batch_bytes`` get any.

        Raises:
            CheckpointError: as ``carry``, with file and tensor.
        """

    def close(self) -> None:
        """Let the worker's own buffers go; what it queued may still be under way."""


class Lane(Protocol):
    """How tensors are made and written on a kind of device.

    Attributes:
        batch_bytes: neighbours in a file that are no more than this are read at once, and no
            more than this is staged at once; 0 if neither is of use.
    """

    @property
    def batch_bytes(self) -> int: ...

    def opening(self, tensors: Sequence[PlannedTensor]) -> AbstractContextManager[None]:
        """While the memory of a group is made; afterwards workers may write to it."""

    def allocate(self, tensor: PlannedTensor) -> torch.Tensor:
        """A new tensor of the planned shape, strides and dtype; its memory is not touched."""

    def worker(self) -> LaneWorker:
        """A worker for the calling thread."""

    def settle(self) -> None:
        """Wait for all that workers queued, and count what overflowed; no worker is at work."""

    def notices(self) -> tuple[str, ...]:
        """What a user should know of how it went."""

    def finish(self) -> None:
        """Wait until everything written can be used by the caller's current stream."""

    def room(self) -> Mapping[str, int]:
        """Bytes that can still be allocated, by device; without those that count as host memory."""

    def peak_bytes(self) -> int:
        """How much device memory was held at most, over what was held when the lane was made."""
