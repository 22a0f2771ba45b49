"""``mp_rank_NN_model_states.pt``: what each rank of a DeepSpeed run saved of its model, whole.

A sequential GPT-NeoX (pipe-parallel-size 0) has all its layers in them, under the numbers that the
pipeline's files have: ``sequential.{number}.{key}``. They are taken apart into the same parts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from streamload.core.errors import CheckpointError, naming, refuse
from streamload.core.wording import printable
from streamload.sources.base import Source
from streamload.sources.block_source import read_each
from streamload.sources.folders import names_in
from streamload.sources.neox.partition_checks import Key, check_layers, check_numbers
from streamload.sources.neox.partitions import NeoXRawSource, Partitions, choose_step
from streamload.sources.torch.torch_files import TorchFile, TorchSource, open_torch, read_torch_file

_RANK_FILE = re.compile(r"mp_rank_([0-9]{1,6})_model_states\.pt")
_ZERO_FILE = re.compile(r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_LAYER_KEY = re.compile(r"sequential\.([0-9]{1,6})\.(.+)")


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one training step: ``folder`` is the one the user named, ``files`` by rank."""

    folder: str
    step_folder: str
    files: Mapping[int, str]
    notices: tuple[str, ...] = ()


def find_rank_files(folder: str) -> RankFiles | None:
    """The rank files in ``folder`` or in its training step's folder; None if there are none.

    Raises:
        CheckpointError: a rank is absent, or has two files; or ``latest`` names no folder.
    """
    found = _in_folder(folder)
    step, notices = (folder, ()) if found else choose_step(folder)
    files = found or _in_folder(step)
    if not files:
        return None
    last = max(files)
    refuse(
        (f"mp_rank_{n:02d}_model_states.pt is absent" for n in range(last) if n not in files),
        path=step,
    )
    return RankFiles(folder, step, files, notices)


def open_rank_files(
    found: RankFiles, *, layers: frozenset[int] | None = None, prefix: str | None = None
) -> Source:
    """Open the files; only headers are read.

    One file that is no sequential GPT-NeoX's is a model's whole state, of whatever kind.

    Args:
        found: as ``find_rank_files`` gives them.
        layers: 0-based blocks of a GPT-NeoX that take part; None: all.
        prefix: of the names that are wanted; see ``open_torch``.

    Raises:
        CheckpointError: files are damaged or do not fit each other, or several are parts of
            another model than GPT-NeoX.
    """
    with naming(found.step_folder), ExitStack() as opened:
        ranks = sorted(found.files)
        paths = [found.files[rank] for rank in ranks]
        headers = dict(zip(ranks, read_each(paths, read_torch_file, opened, given=found.folder)))  # noqa: B905
        sequential = [r for r, f in headers.items() if any(map(_LAYER_KEY.match, f.tensors))]
        if len(ranks) == 1 and not sequential:
            return _whole_state(found, prefix)
        refuse(
            f"{printable(os.path.basename(found.files[rank]))}: no layers of a sequential GPT-NeoX"
            for rank in ranks
            if rank not in sequential
        )
        source = _by_layers(found, headers, layers)
        opened.pop_all()
    return source


def _in_folder(folder: str) -> dict[int, str]:
    files: dict[int, str] = {}
    for name in names_in(folder):
        if match := _RANK_FILE.fullmatch(name):
            rank = int(match[1])
            if rank in files:
                text = f"two files for one rank: {printable(name)} is another mp_rank_{rank:02d}"
                raise CheckpointError(text, path=folder)
            files[rank] = os.path.join(folder, name)
    return files


def _whole_state(found: RankFiles, prefix: str | None) -> TorchSource:
    source = open_torch(list(found.files.values()), given=found.folder, prefix=prefix)
    more = list(found.notices)
    if any(map(_ZERO_FILE.fullmatch, names_in(found.step_folder))):
        more.append(
            "the weights are those that DeepSpeed computes in; the float32 values that its "
            "optimizer holds in zero_pp_rank_* files are not read (zero_to_fp32.py gives them)"
        )
    source.catalog = replace(source.catalog, notices=(*source.catalog.notices, *more))
    return source


def _by_layers(
    found: RankFiles, headers: Mapping[int, TorchFile], layers: frozenset[int] | None
) -> NeoXRawSource:
    """The files as if each layer had one of its own: names, checks and notices are those."""
    parts: dict[Key, TorchFile] = {}
    others: list[str] = []
    for rank, header in headers.items():
        for name, stored in header.tensors.items():
            match = _LAYER_KEY.fullmatch(name)
            if match is None:
                others.append(f"{printable(os.path.basename(header.file.path))}: {name!r}")
                continue
            key = int(match[1]), rank
            part = parts.setdefault(key, replace(header, tensors={}, notices=(), checksums={}))
            parts[key] = replace(part, tensors={**part.tensors, match[2]: stored})
    refuse(f"{other} belongs to no layer" for other in others)
    files = {key: found.files[key[1]] for key in parts}
    blocks = check_numbers(files, max(n for n, _ in parts), parts, layers=layers, name=_name)
    if layers is not None:
        kept = {0, blocks + 3, blocks + 4, *(n + 2 for n in layers)}
        parts = {key: part for key, part in parts.items() if key[0] in kept}
    notices = check_layers(parts)
    for rank, header in headers.items():
        first = min(key for key in parts if key[1] == rank)
        parts[first] = replace(parts[first], notices=header.notices, checksums=header.checksums)
    partitions = Partitions(found.folder, found.step_folder, files, found.notices)
    return NeoXRawSource(partitions, parts, block_count=blocks, notices=notices)


def _name(_files: Mapping[Key, str], layer: int, rank: int | None) -> str:
    """How an absent part is called."""
    if rank is None:
        return f"sequential.{layer}"
    return f"sequential.{layer} of mp_rank_{rank:02d}"
