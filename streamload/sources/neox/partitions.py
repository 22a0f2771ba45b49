"""Raw GPT-NeoX checkpoints: ``layer_NN-model_PP-model_states.pt``, one file per layer and rank.

Numbers as GPT-NeoX's pipeline counts its layers: 0 is the embedding, 2 to L + 1 are the L blocks,
L + 3 is the final norm and L + 4 the readout; 1 and L + 2 hold no parameters and have no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from streamload.core.errors import CheckpointError, naming
from streamload.core.wording import printable
from streamload.sources.block_source import read_each
from streamload.sources.config.neox_params import neox_config
from streamload.sources.folders import names_in
from streamload.sources.neox.partition_checks import check_layers, check_numbers, check_ranks
from streamload.sources.small_files import read_small
from streamload.sources.torch.stored_tensors import StoredTensor
from streamload.sources.torch.torch_files import TorchFile, TorchSource, read_torch_file

_LAYER_FILE = re.compile(r"layer_([0-9]{1,4})-model_([0-9]{1,4})-model_states\.pt")
_STEP_FOLDER = re.compile(r"global_step([0-9]{1,18})")
_FIRST_BLOCK = 2
_MAX_LATEST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Partitions:
    """The partition files of one training step.

    Attributes:
        folder: the folder the user named.
        step_folder: the folder the files are in, ``folder`` itself or one inside it.
        files: path by layer number and rank.
        notices: which step was taken, if there were several.
    """

    folder: str
    step_folder: str
    files: Mapping[tuple[int, int], str]
    notices: tuple[str, ...] = ()


class NeoXRawSource(TorchSource):
    """All partitions of a raw checkpoint as one catalog; ``open_neox`` makes it.

    Stored names are ``layer_{layer}.model_{rank}.{key}`` with plain numbers, in the order of
    layer, key and rank: parts that belong together stand together.

    Attributes:
        ranks: the partitions, 0 to n - 1.
        block_count: transformer blocks of the whole checkpoint.
    """

    def __init__(
        self,
        partitions: Partitions,
        parts: Mapping[tuple[int, int], TorchFile],
        *,
        block_count: int,
        notices: tuple[str, ...],
    ) -> None:
        super().__init__(
            partitions.folder,
            [parts[key] for key in sorted(parts)],
            _by_name(parts),
            (*partitions.notices, *notices),
        )
        self.ranks = tuple(sorted({rank for _, rank in parts}))
        self.block_count = block_count

    def config(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """From ``config.json``, GPT-NeoX's YAML files, or shapes and published values."""
        return neox_config(self.path, self.catalog, blocks=self.block_count, ranks=len(self.ranks))


def find_partitions(folder: str) -> Partitions | None:
    """The partition files in ``folder`` or in its ``global_step*`` folder, None if there are none.

    Of several steps the one that the file ``latest`` names is taken, else the highest number.

    Raises:
        CheckpointError: ``latest`` names no folder inside, or two files for one partition.
    """
    direct = _partitions(folder, folder, ())
    if direct is not None:
        return direct
    return _partitions(folder, *choose_step(folder))


def open_neox(partitions: Partitions, *, layers: frozenset[int] | None = None) -> NeoXRawSource:
    """Open the partition files; only headers are read.

    Args:
        partitions: as ``find_partitions`` gives them.
        layers: 0-based blocks that take part; files of other blocks are not opened. None: all.

    Raises:
        CheckpointError: files are absent or damaged, or partitions do not fit each other. All
            problems of a kind are listed.
    """
    with naming(partitions.step_folder), ExitStack() as opened:
        check_ranks(partitions.files)
        top = max(layer for layer, _ in partitions.files)
        parts = _open_layers(partitions, {top}, opened)
        blocks = check_numbers(partitions.files, top, parts, layers=layers)
        wanted = {0, blocks + 3, blocks + 4}
        wanted |= {_FIRST_BLOCK + block for block in (range(blocks) if layers is None else layers)}
        parts |= _open_layers(partitions, wanted - {top}, opened)
        notices = check_layers(parts)
        source = NeoXRawSource(partitions, parts, block_count=blocks, notices=notices)
        opened.pop_all()
    return source


def _partitions(folder: str, step: str, notices: tuple[str, ...]) -> Partitions | None:
    files: dict[tuple[int, int], str] = {}
    for name in names_in(step):
        match = _LAYER_FILE.fullmatch(name)
        if match is None:
            continue
        key = int(match[1]), int(match[2])
        path = os.path.join(step, name)
        if key in files:
            raise CheckpointError(
                f"two files for one partition: {printable(os.path.basename(files[key]))} and "
                f"{printable(name)}",
                path=step,
            )
        files[key] = path
    return Partitions(folder, step, files, notices) if files else None


def choose_step(folder: str) -> tuple[str, tuple[str, ...]]:
    """The folder of the training step that is meant, and a notice if it was chosen from several.

    Raises:
        CheckpointError: the file ``latest`` names no folder inside.
    """
    names = names_in(folder)
    steps = {
        int(match[1]): name
        for name in names
        if (match := _STEP_FOLDER.fullmatch(name)) and os.path.isdir(os.path.join(folder, name))
    }
    if "latest" in names and os.path.isfile(os.path.join(folder, "latest")):
        return _read_latest(folder), ()
    if not steps:
        return folder, ()
    chosen = steps[max(steps)]
    notice = f"{printable(folder)}: of {len(steps)} training steps the last, {chosen}, was taken"
    return os.path.join(folder, chosen), (notice,) if len(steps) > 1 else ()


def _read_latest(folder: str) -> str:
    path = os.path.join(folder, "latest")
    name = os.fsdecode(read_small(path, max_bytes=_MAX_LATEST_BYTES)).strip()
    inside = name not in ("", ".", "..") and not set(name) & set("/\\:\0")
    if not inside:
        raise CheckpointError(
            f"names {printable(name)!r}, expected the name of a folder beside it", path=path
        )
    step = os.path.join(folder, name)
    if not os.path.isdir(step):
        raise CheckpointError(f"names the folder {printable(name)!r}, which is absent", path=path)
    return step


def _open_layers(
    partitions: Partitions, layers: set[int], opened: ExitStack
) -> dict[tuple[int, int], TorchFile]:
    """The headers of all ranks of ``layers``; the files are ``opened``'s."""
    chosen = {key: path for key, path in sorted(partitions.files.items()) if key[0] in layers}
    headers = read_each(chosen.values(), read_torch_file, opened, given=partitions.step_folder)
    return dict(zip(chosen, headers, strict=True))


def _by_name(parts: Mapping[tuple[int, int], TorchFile]) -> dict[str, StoredTensor]:
    ranks = sorted({rank for _, rank in parts})
    found = {
        f"layer_{layer}.model_{rank}.{key}": parts[layer, rank].tensors[key]
        for layer in sorted({layer for layer, _ in parts})
        for key in parts[layer, ranks[0]].tensors
        for rank in ranks
    }
    return {name: tensor.renamed(name) for name, tensor in found.items()}
