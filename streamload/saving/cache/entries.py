"""The user's cache folder and the entries in it: listed, verified, cleared."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from streamload.core.errors import CheckpointError, ReadError, WriteError
from streamload.core.wording import printable
from streamload.saving.cache.facts import Facts, facts_of
from streamload.saving.cache.trust import open_own, remove_note, used_s, wrong_sums
from streamload.saving.workplace import remove_leftovers
from streamload.sources.folders import names_in
from streamload.sources.safetensors.header import read_header

ENDING = ".safetensors"
# As entries are called (``through``): what else lies in the folder is somebody's, never removed.
_NAME = re.compile(rf"[0-9a-f]{{20}}-[0-9a-f]{{20}}{re.escape(ENDING)}")


def cache_folder() -> str:
    """``$STREAMLOAD_CACHE``, else ``streamload`` in the system's folder for caches."""
    chosen = os.environ.get("STREAMLOAD_CACHE")
    if chosen:
        return os.path.expanduser(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return os.path.join(base, "streamload")
    if os.name == "nt":
        local = os.environ.get("LOCALAPPDATA") or os.path.join("~", "AppData", "Local")
        return os.path.join(os.path.expanduser(local), "streamload", "Cache")
    base = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return os.path.join(os.path.expanduser(base), "streamload")


@dataclass(frozen=True)
class CacheEntry:
    """One converted copy.

    Attributes:
        path: of its file.
        nbytes: of its file.
        source: the checkpoint it was made from, as its path was then.
        dtype: of its floating-point tensors, if they share one.
        written_s, used_s: when, in seconds since the epoch.
        problem: why it cannot be used; empty if it can.
        id: a short name for it.
        made_with: options beside the dtype, as ``name=value``.
        facts: what was noted in its header.
    """

    path: str
    nbytes: int
    source: str = ""
    dtype: str | None = None
    written_s: float = 0.0
    used_s: float = 0.0
    problem: str = ""
    facts: Facts | None = field(default=None, repr=False)

    @property
    def id(self) -> str:
        return hashlib.sha256(os.fsencode(os.path.basename(self.path))).hexdigest()[:8]

    @property
    def made_with(self) -> tuple[str, ...]:
        return self.facts.made_with if self.facts else ()

    def to_dict(self) -> dict[str, Any]:
        now = time.time()
        return {
            "id": self.id,
            "path": printable(self.path),
            "source": printable(self.source),
            "dtype": self.dtype,
            "made_with": list(self.made_with),
            "nbytes": self.nbytes,
            "age_s": max(now - self.written_s, 0.0),
            "unused_s": max(now - self.used_s, 0.0),
            "problem": self.problem,
        }


def list_cache() -> list[CacheEntry]:
    """All entries, the last used one first; temporaries of runs that are gone are removed.

    Files of other names are none, whatever they hold.
    """
    folder = cache_folder()
    remove_leftovers(folder)
    names = names_in(folder) if os.path.lexists(folder) else []
    paths = [os.path.join(folder, name) for name in names if _NAME.fullmatch(name)]
    return sorted((read_entry(path) for path in paths), key=lambda e: -e.used_s)


def read_entry(path: str) -> CacheEntry:
    """An entry by its header; ``problem`` is set if it cannot be used."""
    entry = CacheEntry(path, 0)
    try:
        with open_own(path) as file:
            status = file.status
            # 0.1 has no note and sets the time of access, which listing an entry changes as well.
            used = used_s(path) or max(status.st_atime, status.st_mtime)
            entry = CacheEntry(path, status.st_size, "", None, status.st_mtime, used)
            facts = facts_of(read_header(file))
    except (CheckpointError, ReadError) as error:
        return replace(entry, problem=str(error))
    if facts is None:
        return replace(entry, problem=f"{printable(path)}: not written by this version")
    return replace(
        entry, source=facts.source, dtype=facts.dtype, written_s=facts.written_s, facts=facts
    )


def verify_entry(entry: CacheEntry) -> list[str]:
    """Read all of an entry and compare its checksums; what is wrong, one line each."""
    if entry.problem or entry.facts is None:
        return [entry.problem]
    try:
        with open_own(entry.path) as file:
            return list(wrong_sums(file, read_header(file), entry.facts.crc32))
    except (CheckpointError, ReadError) as error:
        return [str(error)]


def clear_cache(entries: list[CacheEntry] | None = None) -> list[CacheEntry]:
    """Remove entries, all by default; models that map one keep it until they are gone.

    Raises:
        WriteError: one cannot be removed; all others are.
    """
    chosen = list_cache() if entries is None else entries
    failed: list[WriteError] = []
    for entry in chosen:
        try:
            os.unlink(entry.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            why = f"cannot be removed: {error.strerror}"
            failed.append(WriteError(why, path=entry.path, errno=error.errno))
            continue
        remove_note(entry.path)
    if failed:
        raise failed[0]
    return chosen
