"""A tensor made of pieces that lie in torch files: its spec, and its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamload.core.pieces import Box, Pieces
from streamload.core.specs import Shape, TensorSpec
from streamload.sources.torch.stored_tensors import StoredTensor, read_values

if TYPE_CHECKING:
    import torch

    from streamload.sources.files import OpenFile


@dataclass(frozen=True, slots=True)
class Assembled:
    """A tensor and where its pieces are stored.

    Attributes:
        spec: as listed in the catalog: with an extent if it lies in one piece, with an encoding if
            several can be read in blocks; with neither it can but be read whole.
        boxes: where each piece is in the tensor.
        stored: the pieces.
    """

    spec: TensorSpec
    boxes: tuple[Box, ...]
    stored: tuple[StoredTensor, ...]


def assemble(
    name: str, dtype: str, shape: Shape, pieces: Mapping[Box, StoredTensor], *, file: str = ""
) -> Assembled:
    """The tensor ``name`` of ``pieces``, which fill it.

    Args:
        name: it is listed under.
        dtype: the safetensors name of its element type.
        shape: of the whole.
        pieces: what is stored of each box; they may be of several files.
        file: for messages, if there are no pieces (no elements).
    """
    boxes, stored = tuple(pieces), tuple(pieces.values())
    if len(stored) == 1 and boxes[0].sizes == shape:
        return Assembled(stored[0].renamed(name).spec, boxes, stored)
    parts = tuple(piece.spec for piece in stored)
    spec = TensorSpec(name, dtype, shape, parts[0].file if parts else file)
    if parts and all(part.extent is not None and part.strides is None for part in parts):
        spec = TensorSpec(name, dtype, shape, parts[0].file)
    return Assembled(spec, boxes, stored)


def read_assembled(tensor: Assembled, files: Mapping[str, OpenFile]) -> torch.Tensor:
    """The values, contiguous, in memory of their own; one piece is held beside them.

    Raises:
        ReadError, CheckpointError: a piece cannot be read.
    """
    import torch

    from streamload.sources.blocks import torch_dtype

    if len(tensor.stored) == 1 and tensor.boxes[0].sizes == tensor.spec.shape:
        return read_values(files[tensor.stored[0].spec.file], tensor.stored[0])
    values = torch.empty(tensor.spec.shape, dtype=torch_dtype(tensor.spec.dtype))
    for box, stored in zip(tensor.boxes, tensor.stored, strict=True):
        place = values
        for dim, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            place = place.narrow(dim, at, size)
        place.copy_(read_values(files[stored.spec.file], stored))
    return values
