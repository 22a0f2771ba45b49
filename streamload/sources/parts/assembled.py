"""Tensors made of pieces that lie in torch files, and the source that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from streamload.core.pieces import Agreeing, Box, Pieces
from streamload.core.specs import Catalog, Shape, TensorSpec
from streamload.sources.block_source import BlockSource
from streamload.sources.torch.plain_objects import StoredObject
from streamload.sources.torch.stored_tensors import StoredTensor, read_values

if TYPE_CHECKING:
    import torch

    from streamload.sources.files import ReadableFile


@dataclass(frozen=True, slots=True)
class Assembled:
    """A tensor and where its pieces are stored.

    Attributes:
        spec: as listed in the catalog: with an extent if it lies in one piece, with an encoding if
            several can be read in blocks; with neither it can but be read whole.
        pieces: of each box of it, all that is stored of that box; copies must agree.
    """

    spec: TensorSpec
    pieces: tuple[tuple[Box, tuple[StoredTensor, ...]], ...]


def assemble(
    name: str,
    dtype: str,
    shape: Shape,
    pieces: Mapping[Box, Sequence[StoredTensor]],
    *,
    file: str = "",
) -> Assembled:
    """The tensor ``name`` of ``pieces``, whose boxes fill it.

    Args:
        name: it is listed under.
        dtype: the safetensors name of its element type.
        shape: of the whole.
        pieces: what is stored of each box: one piece, or copies of it.
        file: for messages, if there are no pieces (no elements).
    """
    groups = tuple([(box, tuple(copies)) for box, copies in pieces.items()])
    files = [stored.spec.file for _, copies in groups for stored in copies]
    bare = TensorSpec(name, dtype, shape, files[0] if files else file)
    if any(
        stored.spec.extent is None or (stored.spec.strides is not None and len(files) > 1)
        for _, copies in groups
        for stored in copies
    ):
        return Assembled(bare, groups)
    parts = tuple([_agreeing([stored.spec for stored in copies]) for _, copies in groups])
    if len(parts) == 1 and groups[0][0].sizes == shape:
        return Assembled(replace(parts[0], name=name), groups)
    if parts:
        boxes = tuple([box for box, _ in groups])
        bare = replace(bare, encoding=Pieces(parts, dtype, "", shape, boxes))
    return Assembled(bare, groups)


def _agreeing(copies: Sequence[TensorSpec]) -> TensorSpec:
    if len(copies) == 1:
        return copies[0]
    encoding = Agreeing(tuple(copies), copies[0].dtype, "")
    return replace(copies[0], extent=None, encoding=encoding)


class AssembledSource(BlockSource):
    """A checkpoint whose tensors lie in pieces, in files that were written together."""

    is_replaced_whole = False  # a run that saves again writes over the files

    def __init__(
        self,
        path: str,
        files: Sequence[ReadableFile],
        tensors: Mapping[str, Assembled],
        notices: tuple[str, ...],
        objects: Mapping[str, StoredObject] = MappingProxyType({}),
    ) -> None:
        super().__init__(path, files)
        self._assembled = tensors
        self.objects = objects
        self.catalog = Catalog({n: t.spec for n, t in tensors.items()}, notices=notices)

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        from streamload.sources.blocks import torch_dtype
        from streamload.sources.wrapping.reader import values_of

        tensor = self._assembled[name]
        spec = tensor.spec
        if spec.encoding is not None or spec.extent is not None:
            return values_of(self, spec)
        values = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        for box, copies in tensor.pieces:
            place = values
            for dim, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                place = place.narrow(dim, at, size)
            place.copy_(self._piece(name, copies))
        return values

    def _piece(self, name: str, copies: Sequence[StoredTensor]) -> torch.Tensor:
        """The values of one piece; its copies must agree."""
        from streamload.decoding.values.agreeing import refuse_difference

        first, *others = copies
        values = read_values(self._files[first.spec.file], first)
        for other in others:
            again = read_values(self._files[other.spec.file], other)
            refuse_difference(replace(first.spec, name=name), values, other.spec, again)
        return values
