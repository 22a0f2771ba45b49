"""Which file this is: by content where its name says so, else by what the file system knows.

A hub cache names its blobs by content: SHA-256 for large files, git's SHA-1 of a blob for others
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass

from streamload.sources.files import OpenFile, ReadableFile, identity_of, open_file
from streamload.sources.remote.urls import is_url

# Read of a file to know it again; a hit in the cache must stay a matter of milliseconds.
_HEAD_BYTES = 256 << 10
_BLOCK_BYTES = 4 << 10
_BLOCKS = 16
_KINDS = {64: "sha256", 40: "git-sha1"}


@dataclass(frozen=True, slots=True)
class Address:
    """The digest a file's bytes must have; ``kind`` is ``"sha256"`` or ``"git-sha1"``."""

    kind: str
    digest: str


def content_address(path: str) -> Address | None:
    """The content address of a file in a hub cache, or of a link to one; None for others."""
    if is_url(path):
        return None
    folder, name = os.path.split(os.path.realpath(path))
    kind = _KINDS.get(len(name)) if re.fullmatch(r"[0-9a-f]+", name) else None
    return Address(kind, name) if kind and os.path.basename(folder) == "blobs" else None


def file_identity(path: str) -> tuple[object, ...]:
    """What changes when the file does: its content address and size, else what the file system
    knows of it (``identity_of``); with both a digest of samples of its bytes, as the one is only a
    name and the other may be the same for another file where a file system has no ctime.

    Raises:
        CheckpointError, ReadError: the file cannot be read.
    """
    with open_file(path) as file:
        if not isinstance(file, OpenFile):
            return file.identity
        sample = _sample(file)
    address = content_address(path)
    if address is not None:
        return address.kind, address.digest, file.size_bytes, sample
    return *identity_of(file.status), sample


def _sample(file: ReadableFile) -> str:
    """Of the file's beginning, where a header stands, and of blocks spread over it to its end."""
    size = file.size_bytes
    digest = hashlib.sha256(file.read(0, min(size, _HEAD_BYTES)))
    last = size - _BLOCK_BYTES
    for start in range(_HEAD_BYTES, last, max((last - _HEAD_BYTES) // _BLOCKS, _BLOCK_BYTES)):
        digest.update(file.read(start, _BLOCK_BYTES))
    digest.update(file.read(max(last, 0), min(size, _BLOCK_BYTES)))
    return digest.hexdigest()
