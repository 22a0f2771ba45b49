"""Whose a cache folder and the files in it are, and whether an entry is still as it was found good.

Checksums of a large entry take longer than loading it. They are compared before the first use
after the entry was written, moved or touched in whatever way: beside each entry lies a note of
what the file system knew of it when its bytes were known to be right (``identity_of``). No program
can write to a file and leave that as it is.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress

from streamload.core.errors import CheckpointError, ReadError, WriteError
from streamload.core.specs import Catalog
from streamload.core.wording import printable
from streamload.saving.atomic import StagedFile, committing
from streamload.sources.files import OpenFile, ReadableFile, identity_of
from streamload.sources.small_files import loads_strictly

_BLOCK_BYTES = 4 << 20
_MOST_NOTED_BYTES = 4096
_OTHERS = 0o022


def folder_fault(folder: str) -> str:
    """Why nothing in a cache folder is to be believed, in a sentence; empty if it may be.

    Those above it may be others' to write (``/tmp`` is): what they put in its place is theirs.
    """
    try:
        status = os.stat(folder)
    except OSError:
        return ""  # not there: it will be made
    if not stat.S_ISDIR(status.st_mode):
        return f"{printable(folder)}: it is not a folder"
    whose = _owner_fault(status)
    if not whose and not _is_open_to_others(status):
        return ""
    shown = printable(folder)
    what = whose or f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    way = "" if whose else f"run `chmod 700 {shown}`, or "
    return f"{shown}: {what}: {way}let STREAMLOAD_CACHE name a folder of your own"


def _owner_fault(status: os.stat_result) -> str:
    if hasattr(os, "geteuid") and status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user (uid {status.st_uid})"
    return ""


def _is_open_to_others(status: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and bool(status.st_mode & _OTHERS)


def open_own(path: str) -> OpenFile:
    """A file of the cache, open, if nobody else can have written it.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: it is no plain file, a link, or others could have written it.
    """
    file = OpenFile(path)
    fault = _owner_fault(file.status)
    if not fault and _is_open_to_others(file.status):
        fault = f"others can write to it (mode {stat.S_IMODE(file.status.st_mode):04o})"
    try:
        if not os.path.samestat(os.lstat(path), file.status):
            fault = "it is a link, expected a file"
    except OSError as error:
        fault = f"it went away: {error.strerror}"
    if fault:
        file.close()
        raise CheckpointError(fault, path=path)
    return file


def note_path(path: str) -> str:
    """Where it is noted that an entry is good; loads also note there when they used it."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.checked")


def is_known_good(file: OpenFile) -> bool:
    """True if the entry is as it was when its checksums were last known to be right."""
    try:
        with open_own(note_path(file.path)) as note:
            text = note.read(0, min(note.size_bytes, _MOST_NOTED_BYTES))
        found = loads_strictly(text)
    except (CheckpointError, ReadError, ValueError):
        return False
    # Compared as text: JSON's true is 1 for Python.
    return bool(repr(found) == repr(list(identity_of(file.status))))


def note_good(path: str, status: os.stat_result) -> None:
    """Note that an entry's bytes are right; that this cannot be noted costs the next load time."""
    text = json.dumps(identity_of(status)).encode()
    with suppress(WriteError), committing(StagedFile(note_path(path), is_private=True)) as file:
        file.write(text, 0)


def note_use(path: str) -> None:
    """Note that an entry is used now, without touching it."""
    with suppress(OSError):  # another user's: it is used all the same
        os.utime(note_path(path))


def used_s(path: str) -> float:
    """When an entry was last used, as far as noted; 0 if never."""
    try:
        return os.lstat(note_path(path)).st_mtime
    except OSError:
        return 0.0


def remove_note(path: str) -> None:
    with suppress(OSError):
        os.unlink(note_path(path))


def wrong_sums(file: ReadableFile, catalog: Catalog, sums: Mapping[str, str]) -> Iterator[str]:
    """Read all of an entry; a line for each tensor whose bytes do not fit its checksum.

    Raises:
        ReadError: reading fails.
    """
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    for name, spec in catalog.items():
        assert spec.extent is not None, "safetensors have extents"
        checksum = 0
        for done in range(0, spec.extent.nbytes, _BLOCK_BYTES):
            block = buffer[: min(_BLOCK_BYTES, spec.extent.nbytes - done)]
            file.read_into(spec.extent.offset + done, block, tensor=name)
            checksum = zlib.crc32(block, checksum)
        if sums.get(name) != f"{checksum:08x}":
            yield f"{printable(file.path)}: tensor {name!r}: its bytes do not fit its checksum"
