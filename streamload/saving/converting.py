"""``convert``: a checkpoint to another of other names or dtype, without building a model."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from streamload.adapters.opening import open_values
from streamload.core.display.bar import shown_progress
from streamload.core.errors import CheckpointError, PlanError
from streamload.core.options import bound_of_shards, settings_from
from streamload.core.report import ExportReport, LoadedTensor
from streamload.core.signatures import answers_unknown
from streamload.core.specs import Catalog
from streamload.core.wording import listed, printable
from streamload.engine.reduce import compare
from streamload.hf.installed import is_installed
from streamload.mapping.choose import under_prefix
from streamload.mapping.configuration import config_or_guess
from streamload.planning.conversion import Conversion, plan_conversion
from streamload.planning.records import Plan
from streamload.saving.checkpoint import peak_memory, write_checkpoint
from streamload.saving.extras import companions, config_text, left_behind
from streamload.saving.file_layout import only_writable
from streamload.sources.base import Source
from streamload.sources.config.beside import ADAPTER_CONFIG
from streamload.sources.hub import folder_of
from streamload.system.peaks import PeakSampler

if TYPE_CHECKING:
    import torch


@answers_unknown
def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    names: Literal["published", "local"] = "published",
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int | None = None,
    prefix: str | None = None,
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    timeout_s: float | None = None,
    download: bool | None = None,
    progress: Callable[[int, int, str], object] | bool | None = None,
) -> ExportReport:
    """Write a checkpoint anew as safetensors, in bounded memory whatever its size.

    Published names keep the published layout (transformers loads the result); local names have
    the layout of the models here, ``[out, in]`` and cast, so that ``load(path, mode="map")`` is
    ready at once; only streamload reads them, so in a folder they are in ``local.safetensors``.
    Without a name table for the checkpoint's architecture, or where it holds names beyond the
    table or no head, names stay as they are. Tied weights are written once; those that the source
    had under two names come back under two on the way over local names.

    Args:
        source: a checkpoint, as ``load`` takes it.
        path: one file if it ends in ``.safetensors``, otherwise a folder that gets the weights,
            ``config.json`` and the files of tokenizer, processors and generation. It may be the
            source itself: what is there stays whole until the new files are.
        names: ``"published"`` or ``"local"``.
        dtype: cast floating-point tensors to it; rotary tables are never cast.
        max_shard_bytes: tensor data in one file, at most; a folder only.
        prefix: only stored names under it, taken off.
        adapter: LoRA adapters that are merged into the weights; see LoadOptions.
        timeout_s: how long to wait for a server; see LoadOptions.
        download: False streams from the hub what its cache has not; see LoadOptions.
        progress: True shows a bar; or called as progress(done_bytes, total_bytes, name).

    Returns:
        What was written; ``notices`` say what was cast, left out or renamed.

    Raises:
        CheckpointError: the source cannot be used, or its tied weights differ.
        PlanError: tensors are missing, unknown, misshapen, or not what safetensors can hold.
        WriteError: the disk is full, the path cannot be written, or the folder has an index of
            another name, which readers would still follow.
    """
    if names not in ("published", "local"):
        raise ValueError(f"names must be 'published' or 'local', not {names!r}")
    start_s = time.perf_counter()
    reach = {"timeout_s": timeout_s, "download": download}
    asked = {"dtype": dtype, "adapter": adapter, "progress": progress}
    options = settings_from({**asked, **reach})
    max_shard_bytes = bound_of_shards(max_shard_bytes)
    target = os.fsdecode(path)
    from streamload.hf.their_exports import plan_their_conversion  # brings torch

    if options.adapter:
        _refuse_beside_adapter(target)
    wanted = replace(options, prefix=prefix)
    with open_values(source, wanted, keeps_encoded=True) as opened, PeakSampler() as sampler:
        catalog = _under(opened, prefix)
        config, notices = config_or_guess(opened.config(), catalog)
        conversion = plan_conversion(catalog, config, names, options, source=opened.path)
        if conversion.names == "stored" and names == "published" and config and is_installed():
            theirs = plan_their_conversion(opened, catalog, config, options)
            conversion = Conversion(theirs, names, config) if theirs else conversion
        plan = only_writable(conversion.plan)
        plan.raise_if_refused()
        _refuse_unequal_ties(plan, opened)
        extras, left = _extras(opened, plan, conversion.config, target)
        with shown_progress(options.progress, opened.path, doing="converting") as shown:
            report = write_checkpoint(
                plan,
                opened,
                target,
                extras=extras,
                names=conversion.names,
                metadata=conversion.metadata,
                max_shard_bytes=max_shard_bytes,
                progress=shown,
            )
        notices += (*plan.notices, *_casts(plan.ledger), *report.notices)
        notices += (*left, *_about(opened, conversion.names, target, extras))
    return replace(
        report,
        names=conversion.names,
        notices=notices,
        elapsed_s=time.perf_counter() - start_s,
        memory=peak_memory(sampler),
    )


def _refuse_beside_adapter(path: str) -> None:
    """Merged weights beside an adapter: it could be written over, and would be applied again."""
    folder = os.path.dirname(path) or os.curdir if _is_file(path) else path
    if os.path.lexists(os.path.join(folder, ADAPTER_CONFIG)):
        raise PlanError(
            f"{printable(path)}: the folder holds {ADAPTER_CONFIG}: that adapter could be written "
            "over, and other programs would apply it again to the merged weights; name another one"
        )


def _under(source: Source, prefix: str | None) -> Catalog:
    """The source's catalog, or what of it stands under ``prefix``."""
    if not prefix:
        return source.catalog
    tensors = under_prefix(source.catalog, prefix)
    if not tensors:
        first = listed(map(repr, source.catalog), 4)
        text = f"no name under the prefix {prefix!r}; names are {first}"
        raise CheckpointError(text, path=source.path)
    return replace(source.catalog, tensors=tensors)


def _refuse_unequal_ties(plan: Plan, source: Source) -> None:
    lenient = replace(plan, options=replace(plan.options, ties="keep"))
    for comparison in plan.comparisons:
        if compare(lenient, source, comparison) is None:
            continue
        kept, other = (" + ".join(t.sources) for t in (comparison.kept, comparison.other))
        raise CheckpointError(
            f"differs from {kept!r}, but config.json ties them: set tie_word_embeddings to false "
            "there to keep both",
            path=source.path,
            tensor=other,
        )


def _extras(
    source: Source, plan: Plan, config: Mapping[str, Any] | None, path: str
) -> tuple[dict[str, bytes], list[str]]:
    """Small files for the new folder, none beside a single file; and what could not be made."""
    if _is_file(path):
        return {}, []
    extras, left = _companions(source, path)
    if config is not None:
        extras["config.json"] = config_text(config, plan)
    return extras, left


def _companions(source: Source, path: str) -> tuple[dict[str, bytes], list[str]]:
    """Those inside the checkpoint's files, else those beside them."""
    if not source.companions:
        return companions(folder_of(source.path), path), []
    extras, left = {}, []
    for name in source.companions:
        try:
            extras[name] = source.companion(name)
        except CheckpointError as error:
            left.append(f"{name} is not written: {error}")
    return extras, left


def _is_file(path: str) -> bool:
    return path.lower().endswith(".safetensors")


def _about(source: Source, names: str, path: str, extras: Mapping[str, bytes]) -> Iterator[str]:
    """Who reads what was written, and what of the old folder is not in the new one."""
    if names == "local":
        yield (
            "local names: only streamload reads them; for other libraries, convert with "
            "names='published' (--names published)"
        )
    folder = folder_of(source.path)
    if source.is_remote or _is_file(path) or os.path.isfile(source.path):
        return
    if os.path.samefile(folder, path):
        return
    weights = set(map(os.path.basename, source.files))
    indexes = {name for name in os.listdir(folder) if name.endswith(".index.json")}
    left = left_behind(folder, path, {*extras, *weights, *indexes})
    if left:
        yield f"not copied: {listed(map(printable, left), 12)}"


def _casts(written: Sequence[LoadedTensor]) -> list[str]:
    """How many tensors were cast from what to what."""
    casts = Counter((t.stored_dtype, t.dtype) for t in written if t.stored_dtype != t.dtype)
    return [
        f"{count} of {len(written)} tensors were cast from {old} to {new}"
        for (old, new), count in casts.items()
    ]
