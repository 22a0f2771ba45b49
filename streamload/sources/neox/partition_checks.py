"""Whether the partition files of a raw GPT-NeoX checkpoint are complete and fit each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from streamload.core.errors import CheckpointError, refuse
from streamload.core.wording import printable
from streamload.sources.torch.torch_files import TorchFile

Key = tuple[int, int]

_READOUT = "final_linear.weight"
_NORM = "norm.weight"
_EMBEDDING = "word_embeddings.weight"
_ROW_PARALLEL = "attention.dense.weight"


def check_ranks(files: Mapping[Key, str]) -> None:
    """Refuse a checkpoint of which all files of one rank are missing.

    Raises:
        CheckpointError: there are files of a higher rank but none of these.
    """
    present = {rank for _, rank in files}
    absent = sorted(set(range(max(present) + 1)) - present)
    last = f"model_{max(present):02d}"
    refuse([f"there is no file of model_{n:02d}, but there are files of {last}" for n in absent])


def check_numbers(
    files: Mapping[Key, str],
    top: int,
    parts: Mapping[Key, TorchFile],
    *,
    layers: frozenset[int] | None,
    name: Callable[[Mapping[Key, str], int, int | None], str] | None = None,
) -> int:
    """The number of blocks, if every file that takes part is there.

    ``parts`` holds the files of the highest number: what is in them says where the list ends.
    ``name`` says what the part of a layer and rank (None: of any) is called.

    Raises:
        CheckpointError: layers, or single ranks of a layer, are absent; or ``layers`` asks for
            blocks that the checkpoint does not have.
    """
    name = name or _file_name
    keys = {key for (layer, _), part in parts.items() if layer == top for key in part.tensors}
    blocks = top - (4 if _READOUT in keys else 3 if _NORM in keys else 1)
    if layers is not None and (beyond := sorted(n for n in layers if not 0 <= n < blocks)):
        raise CheckpointError(
            f"layers {beyond} were asked for; the checkpoint has blocks 0 to {blocks - 1}"
        )
    chosen = range(blocks) if layers is None else sorted(layers)
    expected = [0, *(block + 2 for block in chosen), blocks + 3, blocks + 4]
    present, ranks = {layer for layer, _ in files}, {rank for _, rank in files}
    problems = [
        f"{name(files, number, None)} is absent ({_meaning(number, blocks)})"
        for number in expected
        if number not in present
    ]
    problems += [
        f"{name(files, layer, rank)} is absent"
        for layer in expected
        if layer in present
        for rank in sorted(ranks)
        if (layer, rank) not in files
    ]
    if blocks < 1:
        problems.append(f"no block: the highest layer number is {top}")
    known = {0, *range(2, blocks + 2), blocks + 3, blocks + 4}
    problems += [
        f"layer_{number:02d} is there, but a model of {blocks} blocks has no such layer"
        for number in sorted(present - known)
    ]
    refuse(problems)
    return blocks


def check_layers(parts: Mapping[Key, TorchFile]) -> tuple[str, ...]:
    """Notices on partitions that fit each other.

    Raises:
        CheckpointError: a key is not in all ranks of a layer, or with different shapes; or a
            layer's files do not hold what their number says.
    """
    groups: dict[int, list[TorchFile]] = {}
    for (layer, _), part in sorted(parts.items()):
        groups.setdefault(layer, []).append(part)
    faults = (_missing_keys(group) or _shape_problems(group) for group in groups.values())
    refuse([problem for found in faults for problem in found])
    numbers = list(groups)
    marks = {numbers[0]: _EMBEDDING, numbers[-2]: _NORM, numbers[-1]: _READOUT}
    found = (_mark_problem(n, g, marks.get(n, _ROW_PARALLEL)) for n, g in groups.items())
    refuse([problem for problem in found if problem])
    return tuple(notice for group in groups.values() for notice in _dtype_notices(group))


def _missing_keys(group: list[TorchFile]) -> list[str]:
    holder: dict[str, TorchFile] = {}
    for part in group:
        for key in part.tensors:
            holder.setdefault(key, part)
    return [
        f"{_base(part)}: lacks {key!r}, which {_base(first)} has"
        for part in group
        for key, first in holder.items()
        if key not in part.tensors
    ]


def _shape_problems(group: list[TorchFile]) -> list[str]:
    problems: list[str] = []
    for key in group[0].tensors:
        shapes = [part.tensors[key].spec.shape for part in group]
        if len(set(shapes)) == 1:
            continue
        if all(shape and shape[1:] == shapes[0][1:] for shape in shapes):
            parts = f"{' + '.join(str(shape[0]) for shape in shapes)} rows"
        else:
            parts = f"shapes {' and '.join(str(list(shape)) for shape in shapes)}"
        problems.append(f"{key!r} in {_base(group[0])} and its other ranks: uneven parts, {parts}")
    return problems


def _dtype_notices(group: list[TorchFile]) -> list[str]:
    mixed = [
        key for key in group[0].tensors if len({part.tensors[key].spec.dtype for part in group}) > 1
    ]
    if not mixed:
        return []
    kinds = " and ".join(part.tensors[mixed[0]].spec.dtype for part in group)
    return [
        f"{_base(group[0])} and its other ranks: parts of different types ({kinds}) for "
        f"{len(mixed)} keys, the first {mixed[0]!r}"
    ]


def _mark_problem(layer: int, group: list[TorchFile], key: str) -> str | None:
    """Why a layer's files are not what their number says, by the key that marks them; or None."""
    stored = group[0].tensors.get(key)
    if stored is None:
        return f"{_base(group[0])}: lacks {key!r}"
    if key != _ROW_PARALLEL:
        return None
    shape = stored.spec.shape
    if len(shape) != 2:
        return f"{key!r} of layer {layer} has shape {list(shape)}, expected two dimensions"
    columns = shape[1] * len(group)
    if shape[0] == columns:
        return None
    return (
        f"{key!r} of layer {layer}: {len(group)} parts of shape {list(shape)} are "
        f"{columns} columns, expected {shape[0]}: is a rank missing?"
    )


def _meaning(number: int, blocks: int) -> str:
    what = {0: "the embedding", blocks + 3: "the final norm", blocks + 4: "the readout"}
    return what.get(number, f"block {number - 2}")


def _file_name(files: Mapping[Key, str], layer: int, rank: int | None) -> str:
    """The name the absent file would have, in the spelling of its neighbours."""
    if rank is None:
        return f"layer_{layer:02d}-model_*-model_states.pt"
    neighbour = next(os.path.basename(p) for (number, _), p in files.items() if number == layer)
    padded = len(neighbour.split("-")[1]) - len("model_")
    return f"{neighbour.split('-')[0]}-model_{rank:0{padded}d}-model_states.pt"


def _base(part: TorchFile) -> str:
    return printable(os.path.basename(part.file.path))
