"""Models that fit only in part: the memory there is, is what a test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import streamload
from streamload.loading import budget, larger
from streamload.loading.calls import plan_checkpoint
from streamload.residency import choice as planned
from streamload.residency import streamer
from streamload.residency.direct import AgainFile
from streamload.system.memory import AvailableMemory

PROMPT = [5, 3, 11, 7]


class Room:
    """Memory for a mapped model: for so many of its blocks, beside all else.

    Attributes:
        bytes: available now; a test may change it.
        reads: (offset, bytes) of every read from the files.
        starts: where each block begins in its file.
    """

    def __init__(self, folder: Any, blocks: int, **options: Any) -> None:
        plan = plan_checkpoint(folder, **options)
        lookups = larger._lookups(plan, streamload.load(folder).model)
        every = tuple(planned._blocks(plan))
        inside = {t.name for block in every for t in block.tensors} | lookups
        rest = sum(t.nbytes for t in plan.tensors if t.mapped and t.name not in inside)
        whole = planned.Residency(every, rest, len(every))
        self.starts = [block.runs[0].start for block in every]
        self.block_bytes = max(block.nbytes for block in every)
        self.pass_bytes = whole.resident_bytes
        self._fixed = whole.always_bytes + whole.ring_bytes
        self.blocks = blocks
        self.reads: list[tuple[int, int]] = []

    @property
    def bytes(self) -> int:
        # The half is for keys, values and activations.
        return self._fixed + int((self.blocks + 0.5) * self.block_bytes)


@contextmanager
def squeezed(patch: pytest.MonkeyPatch, folder: Any, blocks: int, **options: Any) -> Iterator[Room]:
    """Within it, ``blocks`` blocks of the folder's model have room."""
    with patch.context() as inner:
        for module in (planned, streamer):
            inner.setattr(module, "MARGIN_BYTES", 0)
        inner.setattr(streamer, "_ROWS", 0)
        inner.setattr(streamer, "_WIDEST_ITEM", 0)
        inner.setattr(larger, "_file_bytes", lambda: 0)
        room = Room(folder, blocks, **options)
        held: list[Any] = []

        def available() -> AvailableMemory:
            return AvailableMemory(room.bytes - sum(one() for one in held), "cgroup")

        inner.setattr(budget, "available_memory", available)
        inner.setattr(larger, "available_memory", available)
        # The streamer's own memory counts, as it does in a control group.
        make = streamer.BlockStreamer.__init__

        def made(self: Any, *args: Any, **named: Any) -> None:
            make(self, *args, **named)
            reader, own = self._reader, self._blocks

            def taken() -> int:
                resident = sum(block.nbytes for block in own if block.memory)
                ring = reader._in_ring * room.block_bytes
                return int(resident + ring + sum(map(read_of, list(reader._fills.values()))))

            held.append(taken)

        inner.setattr(streamer.BlockStreamer, "__init__", made)
        read = AgainFile.read

        def noted(self: AgainFile, offset: int, buffer: memoryview, **named: Any) -> None:
            room.reads.append((offset, buffer.nbytes))
            read(self, offset, buffer, **named)

        inner.setattr(AgainFile, "read", noted)
        yield room


def read_of(fill: Any) -> int:
    """What a block that is to stay takes already, while it is read."""
    left = sum(chunk.nbytes for chunk in list(fill.chunks))
    return len(fill.memory) - left if fill.stays else 0


def tokens(model: torch.nn.Module, count: int = 5) -> list[int]:
    return list(streamload.generate(model, PROMPT, max_new_tokens=count))


@torch.inference_mode()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found = model(torch.tensor([PROMPT]))
    return getattr(found, "logits", found).clone()


def streamer_of(model: torch.nn.Module) -> Any:
    """What the hooks of the model belong to."""
    (hook,) = model._forward_pre_hooks.values()
    return hook._call.__self__
