"""``convert``: a checkpoint to another of other names or dtype, without building a model."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from streamload.core.errors import CheckpointError
from streamload.core.options import bound_of_shards, settings_from
from streamload.core.report import ExportReport, LoadedTensor, MemoryReport
from streamload.engine.reduce import compare
from streamload.loading.configuration import config_of, find_config
from streamload.planning.conversion import Conversion, plan_conversion
from streamload.saving.checkpoint import write_checkpoint
from streamload.saving.extras import config_text, tokenizer_files
from streamload.saving.writable import only_writable
from streamload.sources.base import Source
from streamload.sources.detect import folder_of, open_checkpoint
from streamload.system.memory import PeakSampler

if TYPE_CHECKING:
    import torch

__all__ = ["convert"]


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    names: str = "published",
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int | None = None,
    progress: Callable[[int, int, str], object] | None = None,
) -> ExportReport:
    """Write a checkpoint anew as safetensors, in bounded memory whatever its size.

    Published names keep the published layout (transformers loads the result); local names have
    the layout of the models here, ``[out, in]`` and cast, so that ``load(path, mode="map")`` is
    ready at once. Without a name table for the checkpoint's architecture names stay as they are.

    Args:
        source: a checkpoint, as ``load`` takes it.
        path: one file if it ends in ``.safetensors``, otherwise a folder that gets the weights,
            ``config.json`` and the tokenizer's files. It may be the source itself: what is there
            stays whole until the new files are.
        names: ``"published"`` or ``"local"``.
        dtype: cast floating-point tensors to it; rotary tables are never cast.
        max_shard_bytes: tensor data in one file, at most; a folder only.
        progress: called as progress(done_bytes, total_bytes, name).

    Returns:
        What was written; ``notices`` say what was cast, left out or renamed.

    Raises:
        CheckpointError: the source cannot be used, or its tied weights differ.
        PlanError: tensors are missing, unknown, misshapen, or nothing that safetensors can hold.
        WriteError: the disk is full, the path cannot be written, or the folder has an index of
            another name, which would go on deciding what it holds.
    """
    if names not in ("published", "local"):
        raise ValueError(f"names must be 'published' or 'local', not {names!r}")
    start_s = time.perf_counter()
    options = settings_from({"dtype": dtype})
    max_shard_bytes = bound_of_shards(max_shard_bytes)
    given = os.fsdecode(path)
    with open_checkpoint(source) as opened, PeakSampler() as sampler:
        config, notices = _config(opened)
        made = plan_conversion(opened.catalog, config, names, options, source=opened.path)
        made = replace(made, plan=only_writable(made.plan))
        made.plan.raise_if_refused()
        _refuse_unequal_ties(made, opened)
        extras = _extras(opened, made, given)
        run, files = write_checkpoint(
            made.plan,
            opened,
            given,
            extras=extras,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )
    return ExportReport(
        given,
        tuple(files),
        made.plan.ledger,
        made.plan.dtype,
        made.names,
        (
            *notices,
            *made.plan.notices,
            *_casts(made.plan.ledger),
            *run.notices,
        ),
        run.bytes_read,
        run.bytes_written,
        time.perf_counter() - start_s,
        MemoryReport(
            peak_rss_bytes=max(sampler.peaks.rss_bytes, 0),
            peak_anonymous_bytes=max(sampler.peaks.anonymous_bytes, 0),
            peak_file_bytes=max(sampler.peaks.file_bytes, 0),
        ),
    )


def _config(source: Source) -> tuple[dict[str, object] | None, tuple[str, ...]]:
    """The checkpoint's configuration, guessed from shapes if need be; None if there is none."""
    config, notices = config_of(source)
    if config is not None:
        return config, notices
    try:
        return find_config(source)
    except CheckpointError:
        return None, ()


def _refuse_unequal_ties(made: Conversion, source: Source) -> None:
    lenient = replace(made.plan, options=replace(made.plan.options, ties="keep"))
    for comparison in made.plan.comparisons:
        if compare(lenient, source, comparison) is None:
            continue
        kept, other = (" + ".join(t.sources) for t in (comparison.kept, comparison.other))
        raise CheckpointError(
            f"differs from {kept!r}, but config.json ties them: set tie_word_embeddings to false "
            "there to keep both",
            path=source.path,
            tensor=other,
        )


def _extras(source: Source, made: Conversion, path: str) -> dict[str, bytes]:
    """Small files for the new folder; none beside a single file."""
    if path.lower().endswith(".safetensors"):
        return {}
    extras = tokenizer_files(folder_of(source.path), path)
    if made.config is not None:
        extras["config.json"] = config_text(made.config, made.plan)
    return extras


def _casts(written: Sequence[LoadedTensor]) -> list[str]:
    """How many tensors were cast from what to what."""
    casts = Counter((t.stored_dtype, t.dtype) for t in written if t.stored_dtype != t.dtype)
    return [
        f"{count} of {len(written)} tensors were cast from {old} to {new}"
        for (old, new), count in casts.items()
    ]
