"""A file of a checkpoint, opened for reading in ranges: on a disk, or at an address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamload.sources.files import LocalFile
from streamload.sources.remote.urls import is_url

if TYPE_CHECKING:
    from streamload.sources.remote.remote_file import RemoteFile


def open_file(path: str) -> LocalFile | RemoteFile:
    """The file at a path or address.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: it is not a file that can be read, or a server refuses it.
        MissingExtraError: a bucket is read with what the extra ``remote`` brings.
    """
    if not is_url(path):
        return LocalFile(path)
    from streamload.sources.remote.remote_file import RemoteFile

    return RemoteFile(path)
