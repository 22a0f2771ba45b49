"""What is known of tensors without touching their data: frozen, pure, no torch import."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from streamload.core.display.cards import Card, Shown
from streamload.core.display.stored import catalog_card
from streamload.core.dtypes import BY_NAME, nbytes_of
from streamload.core.encoding import Encoding
from streamload.core.quick_records import quickly_made

Shape: TypeAlias = tuple[int, ...]


@lru_cache(maxsize=4096)
def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def is_dense(shape: Shape, strides: Shape) -> bool:
    """True if the elements fill a run of memory, each once, in some order."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def is_row_major(shape: Shape, strides: Shape) -> bool:
    """True if the strides are contiguous; those of dimensions of size 1 do not matter."""
    pairs = zip(shape, strides, contiguous_strides(shape), strict=True)
    return all(size == 1 or found == wanted for size, found, wanted in pairs)


def numel(shape: Shape) -> int:
    """Number of elements; 1 for a scalar."""
    return math.prod(shape)


@lru_cache(maxsize=4096)
def size_of(dtype: str, shape: Shape) -> int:
    """Bytes of a dense tensor of the safetensors type ``dtype``; 0 if they are not whole."""
    return nbytes_of(BY_NAME[dtype], shape) or 0


@quickly_made
@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes of one file."""

    file: str
    offset: int
    nbytes: int


@quickly_made
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A stored tensor, as its file's header describes it.

    Attributes:
        name: the stored name.
        dtype: the safetensors name of the element type.
        shape: as stored.
        file: path of the file that holds it, for messages.
        extent: where its bytes are, if they can be read in blocks; None if only
            ``Source.tensor`` can produce the values (legacy pickles, strided slices).
        strides: in elements, if the bytes are dense but not in row-major order; the extent then
            covers the elements in memory order.
        encoding: how other stored tensors make its values; ``dtype`` and ``shape`` are theirs.
    """

    name: str
    dtype: str
    shape: Shape
    file: str
    extent: Extent | None = None
    strides: Shape | None = None
    encoding: Encoding | None = None

    @property
    def nbytes(self) -> int:
        return size_of(self.dtype, self.shape)

    @property
    def stored_dtype(self) -> str:
        """The safetensors dtype of what its files hold."""
        return self.dtype if self.encoding is None else self.encoding.stored_dtype

    @property
    def made_dtype(self) -> str:
        """The safetensors dtype of a target that nobody asked another one for."""
        return (self.encoding and self.encoding.made_dtype) or self.dtype

    @property
    def is_whole(self) -> bool:
        """True if its values, or a part of what they are made of, can but be had all at once."""
        if self.encoding is not None:
            return any(part.is_whole for part in self.encoding.parts)
        return self.extent is None

    def aligned(self, start: int, stop: int) -> tuple[int, int]:
        """The elements that are decoded where [start, stop) are wanted."""
        step = max(self.encoding.quantum, 1) if self.encoding is not None else 1
        return start // step * step, min(-(-stop // step) * step, numel(self.shape))

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """Where the bytes are that its elements [start, stop) need, as far as they have a place."""
        if start >= stop:
            return
        if self.encoding is not None:
            for part, first, last in self.encoding.reads(*self.aligned(start, stop)):
                yield from self.encoding.parts[part].extents(first, last)
        elif self.extent is not None:
            size = BY_NAME[self.dtype].itemsize
            offset = self.extent.offset + start * size
            yield Extent(self.extent.file, offset, (stop - start) * size)

    def files(self) -> Iterator[str]:
        """The files that it needs; one may come several times."""
        yield self.file
        for part in self.encoding.parts if self.encoding is not None else ():
            yield from part.files()


def stored_parts(spec: TensorSpec) -> Iterator[TensorSpec]:
    """What lies in files: the tensor itself, or all that an encoded one is made of."""
    if spec.encoding is None:
        yield spec
        return
    for part in spec.encoding.parts:
        yield from stored_parts(part)


def stored_bytes(specs: Iterable[TensorSpec]) -> int:
    """What tensors take in their files; ``nbytes`` is what their values take."""
    return sum([s.nbytes if s.encoding is None else stored_bytes(s.encoding.parts) for s in specs])


@dataclass(frozen=True, slots=True, repr=False)
class Catalog(Shown, Mapping[str, TensorSpec]):
    """All tensors of a checkpoint by stored name, in file order.

    Attributes:
        tensors: stored name to spec.
        metadata: the header's own string-to-string map.
        notices: oddities worth mentioning that do not stop a load.
        problems: what refuses every load of it, though it can be listed.
    """

    tensors: Mapping[str, TensorSpec]
    metadata: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def _card(self) -> Card:
        return catalog_card(self)

    def __getitem__(self, name: str) -> TensorSpec:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def nbytes(self) -> int:
        """What all of it takes in its files."""
        return stored_bytes(self.tensors.values())


@quickly_made
@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Which stored elements go where: two strided views of one shape.

    ``source`` views the stored tensor's elements in memory order, ``target`` the destination's
    elements, both as flat runs. Walking a StridedCopy backwards is what an export does.
    """

    stored_name: str
    shape: Shape
    source_strides: Shape
    source_offset: int
    target_strides: Shape
    target_offset: int

    def of(self, stored_name: str) -> StridedCopy:
        """The same copy out of another tensor."""
        return StridedCopy(
            stored_name,
            self.shape,
            self.source_strides,
            self.source_offset,
            self.target_strides,
            self.target_offset,
        )

    @property
    def is_run(self) -> bool:
        """True if it is one contiguous run on both sides."""
        return self.source_strides == (1,) == self.target_strides

    @property
    def source_end(self) -> int:
        """One past the last stored element it reads."""
        spans = zip(self.shape, self.source_strides, strict=True)
        return self.source_offset + sum((n - 1) * stride for n, stride in spans) + 1

    @property
    def turns(self) -> bool:
        """True if the stored order's last axis is not the target's: a transposition."""
        return len(self.shape) > 1 and self.target_strides[-1] != min(self.target_strides)
