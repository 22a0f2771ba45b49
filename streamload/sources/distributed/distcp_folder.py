"""Folders of torch.distributed.checkpoint: ``.metadata``, and ``.distcp`` files with the pieces.

Each rank of a run writes the boxes it holds of each tensor. A tensor that lies in one piece is an
ordinary extent; others are read from the pieces that a run of their elements crosses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress

from streamload.core.dtypes import BY_TORCH_NAME
from streamload.core.errors import CheckpointError, naming, refuse
from streamload.core.pieces import tiling_fault
from streamload.core.wording import listed, printable
from streamload.sources.block_source import read_each
from streamload.sources.distributed.items import stored_object, stored_piece
from streamload.sources.distributed.saved_metadata import read_metadata
from streamload.sources.distributed.saved_state import Item, SavedState, SavedTensor, files_of
from streamload.sources.distributed.weights import Weights, choose_weights
from streamload.sources.files import ReadableFile
from streamload.sources.folders import DISTCP_ENDING, DISTCP_METADATA, names_in
from streamload.sources.parts.assembled import Assembled, AssembledSource, assemble


def open_distcp(folder: str, *, given: str, prefix: str | None = None) -> AssembledSource:
    """Open a folder of torch.distributed.checkpoint; only headers are read.

    Args:
        folder: holds ``.metadata``.
        given: the path the user named, for messages.
        prefix: of the names that are wanted, as in ``.metadata``; None takes the model's.

    Raises:
        CheckpointError: the metadata is damaged, foreign or of an unknown version; files are
            absent or cut; or a piece of the model's tensors is missing, overlaps another, or is of
            another shape or type than the metadata says. All problems of a kind are listed.
    """
    saved_bytes = 0
    for name in names_in(folder):
        if name.endswith(DISTCP_ENDING):
            with suppress(OSError):  # said where it is opened
                saved_bytes += os.path.getsize(os.path.join(folder, name))
    path = os.path.join(folder, DISTCP_METADATA)
    state = read_metadata(path, saved_bytes=saved_bytes)
    with naming(path):
        weights = choose_weights(state, prefix, file_bytes=saved_bytes)
        _check_pieces(state, weights)
    with ExitStack() as opened:
        items = [i for saved in weights.tensors.values() for i in state.tensors[saved].items]
        items += [state.objects.get(saved) for saved in weights.objects.values()]
        names = files_of(items)
        paths = [os.path.join(folder, name) for name in names]
        with naming(folder):
            _refuse_absent(folder, names)
            files = dict(
                zip(names, read_each(paths, lambda f: f, opened, given=given), strict=True)
            )
        tensors = _assembled(state, weights, files)
        objects = {
            name: stored_object(files[item.file], item, name)
            for name, saved in weights.objects.items()
            if (item := state.objects[saved]) is not None
        }
        source = AssembledSource(
            given,
            list(files.values()),
            tensors,
            tuple(f"{printable(folder)}: {notice}" for notice in weights.notices),
            objects,
        )
        opened.pop_all()
    return source


def _check_pieces(state: SavedState, weights: Weights) -> None:
    """Refuse tensors whose pieces do not make them, all of them listed."""
    refuse(
        f"tensor {name!r}: {fault}"
        for name, saved in weights.tensors.items()
        if (fault := _fault(state.tensors[saved]))
    )
    refuse(_at_one_place(state, weights))


def _at_one_place(state: SavedState, weights: Weights) -> Iterator[str]:
    """Pieces that are said to be stored where another one is."""
    taken: set[Item] = set()
    for name, saved in weights.tensors.items():
        for box, item in zip(state.tensors[saved].boxes, state.tensors[saved].items, strict=True):
            if item is None:
                continue
            if item in taken:
                yield f"tensor {name!r}: its piece {box} is said to be where another piece is"
            taken.add(item)


def _fault(saved: SavedTensor) -> str:
    if saved.dtype not in BY_TORCH_NAME:
        return f"of element type torch.{saved.dtype}"
    if fault := tiling_fault(saved.shape, saved.boxes):
        return fault
    pairs = zip(saved.boxes, saved.items, strict=True)
    absent = [box for box, item in pairs if item is None and 0 not in box.sizes]
    return f"its pieces {listed(absent, 4)} are not stored" if absent else ""


def _refuse_absent(folder: str, names: Sequence[str]) -> None:
    absent = [name for name in names if not os.path.lexists(os.path.join(folder, name))]
    refuse(f"the file {printable(name)} is absent, which .metadata names" for name in absent)


def _assembled(
    state: SavedState, weights: Weights, files: Mapping[str, ReadableFile]
) -> dict[str, Assembled]:
    """Every tensor with its pieces found in the files, in the order of the files."""
    found: dict[str, Assembled] = {}
    faults: list[CheckpointError] = []
    for name, saved in sorted(
        weights.tensors.items(), key=lambda pair: _first(state.tensors[pair[1]])
    ):
        try:
            found[name] = _placed(name, state.tensors[saved], files)
        except CheckpointError as error:
            faults.append(error)
    if len(faults) == 1:
        raise faults.pop()
    refuse(map(str, faults))
    return found


def _placed(name: str, saved: SavedTensor, files: Mapping[str, ReadableFile]) -> Assembled:
    pieces = {
        box: [stored_piece(files[item.file], item, name, box, saved.dtype)]
        for box, item in zip(saved.boxes, saved.items, strict=True)
        if item is not None and (0 not in box.sizes or 0 in saved.shape)
    }
    return assemble(name, BY_TORCH_NAME[saved.dtype].name, saved.shape, pieces)


def _first(saved: SavedTensor) -> tuple[str, int]:
    items = [item for item in saved.items if item is not None]
    return min(((item.file, item.offset) for item in items), default=("", 0))
