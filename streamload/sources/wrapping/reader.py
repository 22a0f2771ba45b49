"""The one place where elements of a stored tensor become bytes in a buffer."""

from __future__ import annotations

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.encoding import values_at_once
from streamload.core.specs import Extent, TensorSpec, numel
from streamload.decoding.registry import decoder_of
from streamload.decoding.scratch import Scratch
from streamload.sources.base import Source
from streamload.sources.blocks import bytes_of, torch_dtype


class Reader:
    """Reads stored elements of one tensor, decoded where it is encoded.

    Args:
        scratch: the calling thread's, for what decoding takes.

    Attributes:
        held: all elements as a flat tensor in memory order, if they are in host memory already;
            never to be written to.
        quantum: runs of elements are best read from and up to multiples of so many.
        at_once: how many are best read at once and used at once, a multiple of the quantum: those
            are still in the caches; 0 if that makes no difference.
    """

    def __init__(self, source: Source, spec: TensorSpec, scratch: Scratch | None = None) -> None:
        self._source = source
        self._spec = spec
        self._size = BY_NAME[spec.dtype].itemsize
        self._scratch = scratch
        self._parts: _Parts | None = None
        self.quantum = 1 if spec.encoding is None else spec.encoding.quantum
        self.at_once = 0 if spec.encoding is None else values_at_once(spec.encoding)
        self.held = None if spec.encoding is not None else source.held(spec.name)
        if self.held is None and spec.encoding is None and spec.extent is None:
            self.held = source.tensor(spec.name).contiguous().view(-1)

    def __call__(self, start: int, stop: int, buffer: memoryview, /) -> None:
        """Fill ``buffer``, which is the caller's throughout, with the elements [start, stop)."""
        size = self._size
        extent = self._spec.extent
        if self._spec.encoding is not None:
            if stop > start:
                self._decode(start, stop, torch.frombuffer(buffer, dtype=self._dtype))
        elif self.held is not None:
            buffer[:] = bytes_of(self.held)[start * size : stop * size]
        else:
            assert extent is not None, "without an extent the tensor is held"
            part = Extent(extent.file, extent.offset + start * size, (stop - start) * size)
            self._source.read_into(part, buffer, tensor=self._spec.name)

    def rows(self, start: int, width: int, stride: int, buffer: memoryview) -> None:
        """Fill ``buffer``, which is the caller's throughout, with rows, end to end.

        The first one begins with the element ``start``; all are ``width`` elements long, and
        ``stride`` lie between the beginnings of one and the next.
        """
        size, extent = self._size, self._spec.extent
        if self._spec.encoding is None and self.held is None and extent is not None:
            first = Extent(extent.file, extent.offset + start * size, width * size)
            self._source.read_rows(first, stride * size, buffer, tensor=self._spec.name)
            return
        for at in range(0, buffer.nbytes, width * size):
            self(start, start + width, buffer[at : at + width * size])
            start += stride

    @property
    def _dtype(self) -> torch.dtype:
        return torch_dtype(self._spec.dtype)

    def _decode(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Decode in steps that stay in the caches; what is cut inside a quantum by way of scratch.

        Raises:
            CheckpointError, ReadError: as the parts give cause.
        """
        encoding = self._spec.encoding
        assert encoding is not None, "only these are decoded"
        if self._parts is None:
            self._parts = _Parts(self._source, self._spec, self._scratch or Scratch())
        decode, step = decoder_of(encoding.kind), self.at_once
        at = start
        while at < stop:
            end = min((at // step + 1) * step, stop)
            first, last = self._spec.aligned(at, end)
            if (first, last) == (at, end):
                decode(encoding, self._parts, at, end, out[at - start : end - start])
            else:
                room = self._parts.scratch.elements("whole quanta", last - first, out.dtype)
                decode(encoding, self._parts, first, last, room)
                out[at - start : end - start] = room[at - first : end - first]
            at = end


class _Parts:
    """What a decoder reads of one encoded tensor; see ``decoding.scratch.Parts``."""

    def __init__(self, source: Source, spec: TensorSpec, scratch: Scratch) -> None:
        assert spec.encoding is not None, "only these have parts"
        self.scratch = scratch
        self._source = source.below(spec.name)
        self._specs = spec.encoding.parts
        self._readers: dict[int, Reader] = {}
        self._wholes: dict[int, torch.Tensor] = {}

    def _reader(self, part: int) -> Reader:
        reader = self._readers.get(part)
        if reader is None:
            inner = self.scratch.inner(part)
            reader = self._readers[part] = Reader(self._source, self._specs[part], inner)
        return reader

    def read(self, part: int, start: int, stop: int) -> torch.Tensor:
        reader = self._reader(part)
        if reader.held is not None:
            return reader.held[start:stop]
        dtype = torch_dtype(self._specs[part].dtype)
        values = self.scratch.elements(("part", part), stop - start, dtype)
        reader(start, stop, bytes_of(values))
        return values

    def fill(self, part: int, start: int, stop: int, out: torch.Tensor) -> None:
        self._reader(part)(start, stop, bytes_of(out))

    def whole(self, part: int) -> torch.Tensor:
        if part not in self._wholes:
            self._wholes[part] = self.read(part, 0, numel(self._specs[part].shape)).clone()
        return self._wholes[part]


def values_of(source: Source, spec: TensorSpec) -> torch.Tensor:
    """All values of a tensor that is read by its extent or decoded, in memory of their own."""
    flat = torch.empty(numel(spec.shape), dtype=torch_dtype(spec.dtype))
    Reader(source, spec)(0, flat.numel(), bytes_of(flat))
    if spec.strides is None:
        return flat.view(spec.shape)
    return torch.as_strided(flat, spec.shape, spec.strides).contiguous()
