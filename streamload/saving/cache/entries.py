"""The user's cache folder and the entries in it: listed, verified, cleared."""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streamload.core.errors import CheckpointError, ReadError, WriteError
from streamload.core.specs import Catalog
from streamload.core.wording import printable
from streamload.saving.workplace import remove_leftovers
from streamload.sources.files import OpenFile
from streamload.sources.folders import names_in
from streamload.sources.safetensors.header import read_header

VERSION = 1
ENDING = ".safetensors"
METADATA_KEY = "streamload_cache"
_BLOCK_BYTES = 4 << 20


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
        facts: all that was noted in its header.
    """

    path: str
    nbytes: int
    source: str = ""
    dtype: str | None = None
    written_s: float = 0.0
    used_s: float = 0.0
    problem: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        now = time.time()
        return {
            "path": printable(self.path),
            "source": printable(self.source),
            "dtype": self.dtype,
            "nbytes": self.nbytes,
            "age_s": max(now - self.written_s, 0.0),
            "unused_s": max(now - self.used_s, 0.0),
            "problem": self.problem,
        }


def facts_of(catalog: Catalog) -> dict[str, Any]:
    """What an entry's header notes; empty if it is none of this version."""
    try:
        facts = json.loads(catalog.metadata.get(METADATA_KEY, ""))
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) and facts.get("version") == VERSION else {}


def list_cache() -> list[CacheEntry]:
    """All entries, the last used one first; temporaries of runs that are gone are removed."""
    folder = cache_folder()
    remove_leftovers(folder)
    names = names_in(folder) if os.path.lexists(folder) else []
    paths = [os.path.join(folder, n) for n in names if n.endswith(ENDING) and n[0] != "."]
    return sorted((read_entry(path) for path in paths), key=lambda e: -e.used_s)


def read_entry(path: str) -> CacheEntry:
    """An entry by its header; ``problem`` is set if that is damaged or of another version."""
    entry = CacheEntry(path, 0)
    try:
        with OpenFile(path) as file:
            status = file.status
            entry = CacheEntry(path, status.st_size, "", None, status.st_mtime, status.st_atime)
            facts = facts_of(read_header(file))
    except (CheckpointError, ReadError) as error:
        return replace(entry, problem=str(error))
    if not facts:
        return replace(entry, problem="written by another version of streamload")
    return replace(
        entry,
        source=str(facts.get("source", "")),
        dtype=facts.get("dtype"),
        written_s=float(facts.get("written_s", status.st_mtime)),
        used_s=max(status.st_atime, status.st_mtime),
        facts=facts,
    )


def verify_entry(entry: CacheEntry) -> list[str]:
    """Read all of an entry and compare its checksums; what is wrong, one line each."""
    if entry.problem:
        return [entry.problem]
    try:
        with OpenFile(entry.path) as file:
            return list(_wrong_sums(file, entry.facts.get("crc32", {})))
    except (CheckpointError, ReadError) as error:
        return [str(error)]


def _wrong_sums(file: OpenFile, sums: Mapping[str, str]) -> Iterator[str]:
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    for name, spec in read_header(file).items():
        assert spec.extent is not None, "safetensors have extents"
        checksum = 0
        for done in range(0, spec.extent.nbytes, _BLOCK_BYTES):
            block = buffer[: min(_BLOCK_BYTES, spec.extent.nbytes - done)]
            file.read_into(spec.extent.offset + done, block, tensor=name)
            checksum = zlib.crc32(block, checksum)
        if sums.get(name) != f"{checksum:08x}":
            yield f"{printable(file.path)}: tensor {name!r}: its bytes do not fit its checksum"


def clear_cache(entries: list[CacheEntry] | None = None) -> list[CacheEntry]:
    """Remove entries, all by default; models that map one keep it until they are gone.

    Raises:
        WriteError: one cannot be removed.
    """
    removed = list_cache() if entries is None else entries
    for entry in removed:
        try:
            os.unlink(entry.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise WriteError(
                f"cannot be removed: {error.strerror}", path=entry.path, errno=error.errno
            ) from error
    return removed
