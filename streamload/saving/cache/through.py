"""``cache=True``: a load's converted tensors are kept in the user's cache and mapped next time."""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from streamload.core.errors import CheckpointError, CheckpointNotFoundError, ReadError, WriteError
from streamload.core.findings import Finding
from streamload.core.options import Settings
from streamload.core.specs import StridedCopy, contiguous_strides, numel
from streamload.core.wording import format_bytes, printable
from streamload.engine.execute import Execution
from streamload.planning.needed_memory import needed_memory
from streamload.planning.records import MappedView, Plan, PlannedTensor
from streamload.saving.atomic import StagedFile, staged_file
from streamload.saving.cache.entries import (
    ENDING,
    METADATA_KEY,
    VERSION,
    cache_folder,
    facts_of,
    read_entry,
)
from streamload.saving.file_layout import lay_out, name_fault
from streamload.saving.locks import locked
from streamload.sources.addresses import file_identity
from streamload.sources.base import Source
from streamload.sources.blocks import bytes_of
from streamload.sources.safetensors.safetensors_files import SafetensorsSource, open_safetensors

_BLOCK_BYTES = 8 << 20


@dataclass
class Entry:
    """Where a load's converted copy is or will be.

    Attributes:
        plan: the load from the checkpoint itself.
        path: of the entry; empty if the load cannot use the cache.
        plan_key, files_key: what the entry must have been made by and from.
        checkpoint: the checkpoint's path, as the entry notes it.
        source: the open entry, if there is one that fits.
        notices: what became of it, for the report.
    """

    plan: Plan
    path: str = ""
    plan_key: str = ""
    files_key: str = ""
    checkpoint: str = ""
    source: SafetensorsSource | None = None
    notices: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Close the entry's file; mapped tensors stay valid."""
        if self.source is not None:
            self.source.close()


def look_up(plan: Plan, source: Source, settings: Settings) -> tuple[Plan, Source, Entry]:
    """The plan and the source to follow: the cache entry's, or as they are if there is none.

    Args:
        plan: the load from the checkpoint.
        source: the checkpoint.
        settings: without ``cache`` there is nothing to look up, nor to store.

    Returns:
        Also the entry, for ``store``; the caller closes it if ``store`` is never reached.

    Raises:
        ReadError: a file was changed since the checkpoint was opened.
    """
    entry = _entry_for(plan, source, settings) if settings.cache else Entry(plan)
    entry.source = _open(entry)
    if entry.source is None:
        return plan, source, entry
    return _plan_from(plan, entry.source), entry.source, entry


def store(entry: Entry, run: Execution) -> None:
    """Write the entry if there was none, close it if there was, and tell in ``run.findings``.

    That it cannot be written is a notice, not a failure.

    Args:
        entry: from ``look_up``.
        run: the load; what it noticed is kept, to be told by later loads.
    """
    if entry.source is not None:
        entry.close()
    elif entry.path:
        try:
            entry.notices += _write(entry, run)
            _remove_stale(entry)
        except (WriteError, ReadError) as error:
            entry.notices.append(f"cache not written: {error}")
    run.findings += map(Finding, entry.notices)


def _open(entry: Entry) -> SafetensorsSource | None:
    """The entry, open, or None if there is none that can be used."""
    if not entry.path:
        return None
    try:
        source = open_safetensors([entry.path], given=entry.path)
    except CheckpointNotFoundError:
        return None
    except CheckpointError as error:
        entry.notices.append(f"a damaged cache entry is made anew: {error}")
        return None
    facts = facts_of(source.catalog)
    keys = (facts.get("plan"), facts.get("files"))
    fits = keys == (entry.plan_key, entry.files_key) and all(
        (spec := source.catalog.get(t.name)) is not None
        and (spec.dtype, spec.shape) == (t.dtype, t.shape)
        for t in entry.plan.tensors
    )
    if not fits:
        source.close()
        entry.notices.append("a cache entry of another kind is made anew")
        return None
    # An entry is written once, under another name. Each load notes when it was used: in its access
    # time, which changes its ctime too, perhaps while another load reads it.
    source.allow_touching()
    with suppress(OSError):  # another user's: it is used all the same
        os.utime(entry.path, ns=(time.time_ns(), os.stat(entry.path).st_mtime_ns))
    entry.notices += facts.get("notices", [])
    entry.notices.append(f"loaded from cache: {printable(entry.path)}")
    return source


def _write(entry: Entry, run: Execution) -> list[str]:
    """Write the entry; returns what is to be said of it."""
    tensors = entry.plan.tensors
    for tensor in tensors:
        if why := name_fault(tensor.name):
            raise WriteError(why, path=entry.path, tensor=tensor.name)
    sums = {t.name: "0" * 8 for t in tensors}
    facts = {
        "version": VERSION,
        "plan": entry.plan_key,
        "files": entry.files_key,
        "source": entry.checkpoint,
        "dtype": entry.plan.dtype,
        "written_s": time.time(),
        "notices": [str(finding) for finding in run.findings],
        "crc32": sums,
    }
    (layout,) = lay_out(tensors, "entry", metadata={METADATA_KEY: json.dumps(facts)})
    file = staged_file(entry.path, layout.nbytes)
    try:
        for name, offset in layout.offsets.items():
            sums[name] = f"{_write_tensor(file, run.tensors[name], offset):08x}"
        # Sums are of one width, so that the header with them is as long as the one without.
        (final,) = lay_out(tensors, "entry", metadata={METADATA_KEY: json.dumps(facts)})
        assert final.offsets == layout.offsets, "checksums do not move the data"
        file.write(final.header, 0)
        file.finish()
        with locked(os.path.dirname(entry.path)) as problem:
            # Another process may have written it meanwhile, and others may read that one now.
            if _is_there(entry):
                file.discard()
                return [f"cache written by another process: {printable(entry.path)}"]
            file.commit()
    except BaseException:
        file.discard()
        raise
    said = f"cache written: {printable(entry.path)} ({format_bytes(layout.nbytes)})"
    return [said, *file.notices(problem)]


def _is_there(entry: Entry) -> bool:
    """True if there is an entry that can be used."""
    found = replace(entry, source=None, notices=[])
    found.source = _open(found)
    found.close()
    return found.source is not None


def _remove_stale(entry: Entry) -> None:
    """Entries of the same checkpoint, from before it was changed."""
    folder, own = os.path.split(entry.path)
    start = own.partition("-")[0] + "-"
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name == own or not (name.startswith(start) and name.endswith(ENDING)):
            continue
        if read_entry(path).source in ("", entry.checkpoint):
            with suppress(OSError):
                os.unlink(path)


def cache_settings(settings: Settings, *, is_empty: bool) -> Settings:
    """The settings under which a load that may be cached is planned: streamed, contiguous.

    Args:
        settings: as given.
        is_empty: the module holds no values yet.
    """
    if not settings.cache or not is_empty or settings.layout == "stored":
        return settings
    return replace(settings, mode="stream", layout="contiguous")


def _entry_for(plan: Plan, source: Source, settings: Settings) -> Entry:
    reason = _why_not(plan, settings)
    if reason:
        return Entry(plan, notices=[f"cache not used: {reason}"])
    files = {plan.stored[name].file for t in plan.tensors for name in t.sources}
    try:
        identities = [file_identity(path) for path in sorted(files)]
    except (CheckpointError, ReadError) as error:
        return Entry(plan, notices=[f"cache not used: {error}"])
    source.check_unchanged()  # the identities are those of what was opened
    plan_key = _digest(_ledger(plan))
    files_key = _digest(map(repr, identities))
    name = f"{plan_key[:20]}-{files_key[:20]}{ENDING}"
    given = source.path if source.path.startswith("hf:") else os.path.abspath(source.path)
    return Entry(plan, os.path.join(cache_folder(), name), plan_key, files_key, printable(given))


def _why_not(plan: Plan, settings: Settings) -> str:
    if any(not t.is_new for t in plan.tensors):
        return "the module holds values, which are overwritten in place"
    if settings.layout == "stored":
        return "it keeps contiguous weights, and layout='stored' was asked for"
    if settings.on_layer is not None or settings.quantize is not None:
        return "blocks are changed while they are loaded (on_layer, quantize)"
    return ""


def _ledger(plan: Plan) -> Iterator[str]:
    """Everything that decides the converted values, line by line."""
    options = plan.options
    yield f"{VERSION} {options.ties} {options.overflow} {options.replicas}"
    for t in sorted(plan.tensors, key=lambda tensor: tensor.name):
        sources = [plan.stored[name].name for name in t.sources]
        yield repr((t.name, t.shape, t.dtype, sources, t.stored_dtype, t.reduces, t.tolerance))
        yield repr([plan.stored[m.stored_name].name for m in t.copies])
        yield repr(t.copies)
    for comparison in plan.comparisons:
        yield repr((comparison.kept.sources, comparison.other.sources))


def _digest(lines: Iterable[str]) -> str:
    text = "".join(f"{line}\n" for line in lines)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _plan_from(plan: Plan, source: Source) -> Plan:
    """The same targets, each a view of the entry or copied from it to its device."""
    tensors = tuple(_from_entry(t) for t in plan.tensors)
    stored = source.catalog.tensors
    options = replace(plan.options, mode="map", layout="contiguous")
    memory = needed_memory(tensors, stored, options)
    return replace(
        plan, tensors=tensors, comparisons=(), options=options, stored=stored, memory=memory
    )


def _from_entry(tensor: PlannedTensor) -> PlannedTensor:
    count, strides = numel(tensor.shape), contiguous_strides(tensor.shape)
    is_view = tensor.device == "cpu" and count > 0
    return replace(
        tensor,
        sources=(tensor.name,),
        stored_dtype=tensor.dtype,
        strides=strides,
        copies=(StridedCopy(tensor.name, (count,), (1,), 0, (1,), 0),) if count else (),
        transform="",
        reduces="",
        mapped=MappedView(tensor.name, 0, strides) if is_view else None,
    )


def _write_tensor(file: StagedFile, tensor: torch.Tensor, offset: int) -> int:
    """Write a tensor's bytes in row-major order, a block at a time; returns their CRC-32."""
    flat = tensor.detach().contiguous().view(-1)
    itemsize = flat.element_size()
    step = max(_BLOCK_BYTES // itemsize, 1)
    checksum = 0
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step].cpu()
        data = bytes_of(part)
        file.write(data, offset + start * itemsize)
        checksum = zlib.crc32(data, checksum)
    return checksum
