"""Memory that one thread uses again and again while it decodes."""

from __future__ import annotations

from typing import Protocol

import torch

from streamload.system.pages import empty_pages


class Buffer:
    """Bytes that are reused from block to block; grown, never shrunk."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def elements(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of ``count`` elements over the buffer, contents as they were."""
        nbytes = count * dtype.itemsize
        if self._bytes.numel() < nbytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # let the old one go first
            self._bytes = empty_pages((nbytes,), torch.uint8)
        return self._bytes[:nbytes].view(dtype)


class Scratch:
    """One thread's buffers by name."""

    def __init__(self) -> None:
        self._buffers: dict[object, Buffer] = {}
        self._inner: dict[object, Scratch] = {}

    def elements(self, name: object, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``count`` elements, contents as they were; the buffer called ``name`` until the next
        call for it.
        """
        return self._buffers.setdefault(name, Buffer()).elements(count, dtype)

    def inner(self, name: object) -> Scratch:
        """A room of its own for what is decoded on the way."""
        return self._inner.setdefault(name, Scratch())


class Parts(Protocol):
    """What a decoder is given: the stored tensors it reads, and room to work in."""

    scratch: Scratch

    def read(self, part: int, start: int, stop: int) -> torch.Tensor:
        """The elements [start, stop) of a part in memory order, flat and of its dtype.

        They may be the source's own memory, which is never to be written to, and are good until
        the same part is read again.
        """

    def whole(self, part: int) -> torch.Tensor:
        """All elements of a small part, as ``read``; kept until the next run of values."""
