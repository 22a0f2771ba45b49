"""How large the cache may become: a note in its folder, and what goes first when it is full."""

from __future__ import annotations

import json
import os
from contextlib import suppress

from streamload.core.errors import CheckpointError, ReadError, WriteError
from streamload.core.wording import format_bytes, plural
from streamload.saving.atomic import StagedFile, committing, translated
from streamload.saving.cache.entries import CacheEntry, cache_folder, clear_cache, list_cache
from streamload.saving.cache.trust import folder_fault, open_own
from streamload.sources.small_files import loads_strictly

_NOTE = ".limit.json"
_KEY = "max_bytes"
_MOST_NOTED_BYTES = 4096


def cache_limit() -> int | None:
    """The most bytes that entries may take together; None if there is no limit."""
    path = os.path.join(cache_folder(), _NOTE)
    try:
        with open_own(path) as file:
            found = loads_strictly(file.read(0, min(file.size_bytes, _MOST_NOTED_BYTES)))
    except (CheckpointError, ReadError, ValueError):
        return None
    limit = found.get(_KEY) if isinstance(found, dict) else None
    return limit if type(limit) is int and limit > 0 else None


def set_cache_limit(max_bytes: int | None) -> list[CacheEntry]:
    """Set or lift the limit, for this call and all loads from now on; returns what was removed.

    Raises:
        WriteError: the note cannot be written, or an entry not removed.
    """
    folder = cache_folder()
    path = os.path.join(folder, _NOTE)
    if max_bytes is None:
        with translated(path), suppress(FileNotFoundError):
            os.unlink(path)
        return []
    with translated(folder):
        os.makedirs(folder, 0o700, exist_ok=True)
    if fault := folder_fault(folder):
        raise WriteError(fault)
    with committing(StagedFile(path, is_private=True)) as file:
        file.write(json.dumps({_KEY: max_bytes}).encode(), 0)
    return trim_cache(max_bytes)


def trim_cache(max_bytes: int, *, kept: str = "") -> list[CacheEntry]:
    """Remove entries, the one that was used longest ago first, until the others fit.

    Args:
        max_bytes: for all that stay.
        kept: the path of an entry that stays in any case.

    Raises:
        WriteError: one cannot be removed.
    """
    entries = list_cache()
    total = sum(entry.nbytes for entry in entries)
    leaving = []
    for entry in reversed(entries):
        if total <= max_bytes:
            break
        if entry.path != kept:
            leaving.append(entry)
            total -= entry.nbytes
    return clear_cache(leaving)


def too_large(nbytes: int) -> str:
    """Why an entry of so many bytes is not written, or nothing."""
    limit = cache_limit()
    if limit is None or nbytes <= limit:
        return ""
    return f"{format_bytes(nbytes)} are more than the cache may have ({format_bytes(limit)})"


def make_room(kept: str) -> list[str]:
    """Keep the cache under its limit, now that an entry was written; a line on what was removed."""
    limit = cache_limit()
    removed = trim_cache(limit, kept=kept) if limit is not None else []
    if not removed:
        return []
    what = plural(len(removed), "copy", "copies")
    size = format_bytes(sum(entry.nbytes for entry in removed))
    return [f"removed from the cache, to keep it under its limit: {what}, {size}"]
