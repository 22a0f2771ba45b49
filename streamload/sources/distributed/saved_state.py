"""What ``.metadata`` says of a saved state, as records of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from streamload.core.pieces import Box
from streamload.core.specs import Shape

Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """Where a piece, or an object, is stored: a whole archive of ``torch.save`` in a file."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor of a saved state: ``dtype`` is torch's name of it.

    ``items`` has where each box is stored; None where the file does not say.
    """

    dtype: str
    shape: Shape
    boxes: tuple[Box, ...]
    items: tuple[Item | None, ...]


@dataclass(frozen=True, slots=True)
class SavedState:
    """All that was saved, by its flat name (the keys on the way to it, joined by dots).

    Attributes:
        tensors: name → tensor.
        objects: name → where what is no tensor is stored.
        paths: name → the keys on the way to it, if the writer noted them.
    """

    tensors: Mapping[str, SavedTensor]
    objects: Mapping[str, Item | None]
    paths: Mapping[str, Path]


def files_of(items: Iterable[Item | None]) -> list[str]:
    """The files that hold ``items``, each once, in order."""
    return sorted({item.file for item in items if item is not None})
