"""Which file this is: by content where its name says so, else by what the file system knows.

A hub cache names its blobs by content: SHA-256 for large files, git's SHA-1 of a blob for others
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_KINDS = {64: "sha256", 40: "git-sha1"}


@dataclass(frozen=True, slots=True)
class Address:
    """The digest a file's bytes must have; ``kind`` is ``"sha256"`` or ``"git-sha1"``."""

    kind: str
    digest: str


def content_address(path: str) -> Address | None:
    """The content address of a file in a hub cache, or of a link to one; None for others."""
    folder, name = os.path.split(os.path.realpath(path))
    kind = _KINDS.get(len(name)) if re.fullmatch(r"[0-9a-f]+", name) else None
    return Address(kind, name) if kind and os.path.basename(folder) == "blobs" else None


def file_identity(path: str) -> tuple[object, ...]:
    """What changes when the file does: its content address and size, else device, inode, size and
    time of the last change.
    """
    status = os.stat(path)
    address = content_address(path)
    if address is not None:
        return address.kind, address.digest, status.st_size
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
