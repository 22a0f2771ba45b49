"""``cache=True``: a load's converted tensors are kept in the user's cache and mapped next time."""

from __future__ import annotations

import os
import time
import zlib
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ReadError,
    WriteError,
    refuse,
)
from streamload.core.findings import Finding
from streamload.core.options import Settings
from streamload.core.specs import Catalog
from streamload.core.wording import format_bytes, printable
from streamload.engine.execute import Execution
from streamload.planning.records import Plan
from streamload.saving.atomic import StagedFile, staged_file, translated
from streamload.saving.cache.entries import ENDING, cache_folder, read_entry
from streamload.saving.cache.facts import Facts, facts_of
from streamload.saving.cache.limit import make_room, too_large
from streamload.saving.cache.plans import digest, made_with, plan_from, plan_key, why_not
from streamload.saving.cache.trust import (
    folder_fault,
    is_known_good,
    note_good,
    note_use,
    open_own,
    remove_note,
    wrong_sums,
)
from streamload.saving.file_layout import lay_out, name_fault
from streamload.saving.locks import locked
from streamload.sources.addresses import file_identity
from streamload.sources.base import Source
from streamload.sources.blocks import bytes_of
from streamload.sources.safetensors.header import read_header
from streamload.sources.safetensors.safetensors_files import SafetensorsSource

_BLOCK_BYTES = 8 << 20


@dataclass
class Entry:
    """Where a load's converted copy is or will be.

    Attributes:
        plan: the load from the checkpoint itself.
        path: of the entry; empty if the load cannot use the cache.
        plan_key, files_key: what the entry must have been made by and from.
        checkpoint: the checkpoint's path, as the entry notes it.
        made_with: options, as the entry notes them.
        source: the open entry, if there is one that fits.
        notices: what became of it, for the report.
    """

    plan: Plan
    path: str = ""
    plan_key: str = ""
    files_key: str = ""
    checkpoint: str = ""
    made_with: tuple[str, ...] = ()
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
    return plan_from(plan, entry.source), entry.source, entry


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
            entry.notices += make_room(entry.path)
        except (WriteError, ReadError) as error:
            entry.notices.append(f"cache not written: {error}")
    run.findings += map(Finding, entry.notices)


def _open(entry: Entry) -> SafetensorsSource | None:
    """The entry, open, or None if there is none that can be used."""
    if not entry.path:
        return None
    try:
        found = _open_fitting(entry)
    except CheckpointNotFoundError:
        return None
    except (CheckpointError, ReadError) as error:
        entry.notices.append(f"a damaged cache entry is made anew: {error}")
        return None
    if found is None:
        entry.notices.append("a cache entry of another kind is made anew")
        return None
    source, facts = found
    source.allow_touching()  # older versions note in its times that they used it
    note_use(entry.path)
    entry.notices += facts.notices
    entry.notices.append(f"loaded from cache: {printable(entry.path)}")
    return source


def _open_fitting(entry: Entry) -> tuple[SafetensorsSource, Facts] | None:
    """The entry and its facts; None if it was made by or from something else.

    Raises:
        CheckpointError, ReadError: it cannot be used, or its bytes do not fit its checksums.
    """
    with ExitStack() as opened:
        file = opened.enter_context(open_own(entry.path))
        catalog = read_header(file)
        facts = facts_of(catalog)
        if facts is None or not _fits(entry, facts, catalog):
            return None
        if not is_known_good(file):
            refuse(wrong_sums(file, catalog, facts.crc32))
            file.check_unchanged()
            note_good(entry.path, file.status)
            entry.notices.append("the cache entry was moved or touched: its checksums still match")
        opened.pop_all()
    return SafetensorsSource(entry.path, [file], catalog), facts


def _fits(entry: Entry, facts: Facts, catalog: Catalog) -> bool:
    """True if it has just the tensors of the plan, each where it can be mapped."""
    if (facts.plan, facts.files) != (entry.plan_key, entry.files_key):
        return False
    planned = {t.name: (t.dtype, t.shape) for t in entry.plan.tensors}
    stored = {name: (spec.dtype, spec.shape) for name, spec in catalog.items()}
    return stored == planned and all(
        spec.extent is not None and spec.extent.offset % BY_NAME[spec.dtype].itemsize == 0
        for spec in catalog.tensors.values()
    )


def _write(entry: Entry, run: Execution) -> list[str]:
    """Write the entry; returns what is to be said of it."""
    tensors = entry.plan.tensors
    for tensor in tensors:
        if why := name_fault(tensor.name):
            raise WriteError(why, path=entry.path, tensor=tensor.name)
    folder = os.path.dirname(entry.path)
    with translated(folder):
        os.makedirs(folder, 0o700, exist_ok=True)
    if fault := folder_fault(folder):
        raise WriteError(fault)
    sums = {t.name: "0" * 8 for t in tensors}
    facts = Facts(
        plan=entry.plan_key,
        files=entry.files_key,
        source=entry.checkpoint,
        dtype=entry.plan.dtype,
        written_s=time.time(),
        notices=tuple(str(finding) for finding in run.findings),
        made_with=entry.made_with,
        crc32=sums,
    )
    (layout,) = lay_out(tensors, "entry", metadata=facts.metadata())
    if why := too_large(layout.nbytes):
        raise WriteError(why)
    file = staged_file(entry.path, layout.nbytes, is_private=True)
    try:
        for name, offset in layout.offsets.items():
            sums[name] = f"{_write_tensor(file, run.tensors[name], offset):08x}"
        # Sums are of one width, so that the header with them is as long as the one without.
        (final,) = lay_out(tensors, "entry", metadata=facts.metadata())
        assert final.offsets == layout.offsets, "checksums do not move the data"
        file.write(final.header, 0)
        file.finish()
        with locked(folder) as problem:
            # Another process may have written it meanwhile, and others may read that one now.
            if _is_there(entry):
                file.discard()
                return [f"cache written by another process: {printable(entry.path)}"]
            file.commit()
            note_good(entry.path, os.lstat(entry.path))
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
    with suppress(OSError):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if name == own or not (name.startswith(start) and name.endswith(ENDING)):
                continue
            if read_entry(path).source in ("", entry.checkpoint):
                os.unlink(path)
                remove_note(path)


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
    reason = why_not(plan, settings)
    if reason:
        return Entry(plan, notices=[f"cache not used: {reason}"])
    folder = cache_folder()
    if fault := folder_fault(folder):
        return Entry(plan, notices=[f"cache not used: {fault}"])
    files = {file for t in plan.tensors for n in t.sources for file in plan.stored[n].files()}
    try:
        identities = [file_identity(path) for path in sorted(files)]
    except (CheckpointError, ReadError) as error:
        return Entry(plan, notices=[f"cache not used: {error}"])
    source.check_unchanged()  # the identities are those of what was opened
    key = plan_key(plan)
    files_key = digest(map(repr, identities))
    name = f"{key[:20]}-{files_key[:20]}{ENDING}"
    is_name = source.is_remote or source.path.startswith("hf:")
    given = source.path if is_name else os.path.abspath(source.path)
    path = os.path.join(folder, name)
    return Entry(plan, path, key, files_key, printable(given), made_with(settings))


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
