"""A plan's tensors as a checkpoint on disk: one file, or a folder with shards and an index."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from streamload.core.errors import CheckpointError, WriteError
from streamload.core.options import Progress
from streamload.core.report import ExportReport, MemoryReport
from streamload.engine.execute import Execution
from streamload.planning.records import Plan
from streamload.saving.atomic import StagedFile, committing, staged_file
from streamload.saving.file_layout import NewFile, index_text, lay_out
from streamload.saving.pipeline import Place, fill
from streamload.saving.staged_folder import StagedFolder
from streamload.sources.base import Source
from streamload.sources.folders import LOCAL_FILE
from streamload.sources.index import read_index
from streamload.sources.remote.urls import is_url
from streamload.system.peaks import PeakSampler

# What a folder's weights are called. Those under our own names get a name of their own: as
# model.safetensors other libraries would take them for their class's and make a random model.
_STEMS = {"published": "model", "local": LOCAL_FILE.removesuffix(".safetensors")}
# Writes every tensor to its place.
Filling: TypeAlias = Callable[[Mapping[str, Place]], Execution]
_INDEXES = tuple(f"{stem}.safetensors.index.json" for stem in _STEMS.values())


def write_checkpoint(
    plan: Plan,
    source: Source,
    path: str,
    *,
    extras: Mapping[str, bytes],
    names: str = "published",
    metadata: Mapping[str, str] = MappingProxyType({}),
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
    filling: Filling | None = None,
) -> ExportReport:
    """Write a plan's tensors as a checkpoint; on any exception what was there is whole.

    Args:
        plan: must hold.
        source: what the plan was made from.
        path: one file if it ends in ``.safetensors``, else a folder.
        extras: small files for a folder, by name (``config.json``, tokenizers).
        names: ``"local"`` gives a folder's weights a file name that only streamload knows.
        metadata: see ``lay_out``.
        max_shard_bytes: see ``lay_out``.
        progress: see ``fill``.
        filling: fills the files, in place of ``fill``.

    Returns:
        What was written; the caller adds names, time and memory.
    """
    if is_url(path):
        raise WriteError("is an address: checkpoints are written to this machine only", path=path)
    if path.lower().endswith(".safetensors"):
        if max_shard_bytes is not None:
            raise ValueError("max_shard_bytes needs a folder, not one file")
        (layout,) = lay_out(plan.tensors, os.path.basename(path), metadata=metadata)
        run, files, notices = _write_file(plan, source, path, layout, progress, filling)
    else:
        file = f"{_STEMS.get(names, 'model')}.safetensors"
        shards = partial(lay_out, plan.tensors, metadata=metadata, max_shard_bytes=max_shard_bytes)
        run, files, notices = _write_folder(
            plan, source, path, file, shards, extras, progress, filling
        )
    return ExportReport(
        path,
        tuple(files),
        plan.ledger,
        plan.dtype,
        notices=(*run.notices, *notices),
        bytes_read=run.bytes_read,
        bytes_written=run.bytes_written,
    )


def peak_memory(sampler: PeakSampler) -> MemoryReport:
    """The peaks over the start of the sampling."""
    peaks = sampler.peaks
    return MemoryReport(
        peak_rss_bytes=peaks.rss_bytes,
        peak_anonymous_bytes=peaks.anonymous_bytes,
        peak_file_bytes=peaks.file_bytes,
    )


# What was seen of the data, the files of the weights, and notices.
_Written = tuple[Execution, list[str], list[str]]


def _write_file(
    plan: Plan,
    source: Source,
    path: str,
    layout: NewFile,
    progress: Progress | None,
    filling: Filling | None,
) -> _Written:
    if os.path.isdir(path):
        raise WriteError("is a folder", path=path)
    with committing(staged_file(path, layout.nbytes)) as file:
        run = _fill_files(plan, source, [(layout, file)], progress, filling)
    return run, [layout.name], file.notices()


def _write_folder(
    plan: Plan,
    source: Source,
    path: str,
    file: str,
    shards: Callable[..., list[NewFile]],
    extras: Mapping[str, bytes],
    progress: Progress | None,
    filling: Filling | None,
) -> _Written:
    if os.path.lexists(path) and not os.path.isdir(path):
        raise WriteError("is not a folder", path=path)
    _refuse_foreign_index(path)
    layouts = shards(file)
    alone, index_name = len(layouts) == 1, f"{file}.index.json"

    def settle() -> list[str]:
        nonlocal layouts
        _refuse_foreign_index(path)
        if not alone and any(os.path.lexists(os.path.join(path, f.name)) for f in layouts):
            # A reader must never meet shards of two sets under one name.
            token = secrets.token_hex(4)
            layouts = shards(file, token=token)
            for layout, (_, shard) in zip(layouts, staged, strict=True):
                shard.path = os.path.join(os.path.dirname(shard.path), layout.name)
            folder.add(index_name, seals=True, instead_of=index).write(index_text(layouts), 0)
        return _old_files(path)

    nbytes = sum(f.nbytes for f in layouts)
    with committing(StagedFolder(path, nbytes=nbytes, settle=settle)) as folder:
        staged = [(f, folder.add(f.name, seals=alone)) for f in layouts]
        run = _fill_files(plan, source, staged, progress, filling)
        if not alone:
            index = folder.add(index_name, seals=True)
            index.write(index_text(layouts), 0)
        for name, text in extras.items():
            folder.add(name).write(text, 0)
    return run, [f.name for f in layouts], folder.notices()


def _fill_files(
    plan: Plan,
    source: Source,
    files: Sequence[tuple[NewFile, StagedFile]],
    progress: Progress | None,
    filling: Filling | None,
) -> Execution:
    places: dict[str, Place] = {}
    for layout, file in files:
        file.write(layout.header, 0)
        places.update({name: (file, offset) for name, offset in layout.offsets.items()})
    if filling is not None:
        return filling(places)
    return fill(plan, source, places, progress=progress)


def _refuse_foreign_index(folder: str) -> None:
    """An index of another name would still decide which files a reader opens."""
    if not os.path.isdir(folder):
        return
    names = [n for n in os.listdir(folder) if n.lower().endswith(".safetensors.index.json")]
    foreign = sorted(n for n in names if n not in _INDEXES and not n.startswith("."))
    if foreign:
        raise WriteError(
            f"holds {foreign[0]!r}, which readers would follow instead of the new files; choose "
            "another folder",
            path=folder,
        )


def _old_files(folder: str) -> list[str]:
    """The files of an older export in ``folder``: its index first, then what it names.

    The index may be anybody's: only safetensors files of the folder itself are believed.
    """
    old: list[str] = []
    for index in _INDEXES:
        named = [index.removesuffix(".index.json")]
        if os.path.isfile(os.path.join(folder, index)):
            old.append(index)
            with suppress(CheckpointError):
                named = sorted(set(read_index(os.path.join(folder, index)).values()))
        shards = [n for n in named if n.endswith(".safetensors") and n == os.path.basename(n)]
        old += [n for n in shards if os.path.isfile(os.path.join(folder, n))]
    return old
