"""Small files beside remote weights, for those who need them as bytes or as files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from streamload.core.errors import CheckpointError, CheckpointNotFoundError
from streamload.core.options import AT_HAND, Reach
from streamload.sources.config.companions import USUAL_NAMES, is_companion
from streamload.sources.files import open_file
from streamload.sources.hub import find_in_hub_cache, folder_of, is_hub_name
from streamload.sources.remote.answers import RefusedError
from streamload.sources.remote.registry import find_site, leave_site, using
from streamload.sources.remote.urls import is_url, join, parse_url

_MAX_BYTES = 64 << 20


def read_companions(folder: str, *more: str) -> dict[str, bytes]:
    """The companions at an address by name, and those of ``more`` that are there.

    Raises:
        CheckpointError, ReadError: one of them cannot be read.
    """
    url = parse_url(folder)
    site = find_site(url)
    absent: type[CheckpointError] = CheckpointNotFoundError
    try:
        try:
            listed = site.names(url.path)
        except RefusedError:
            # Who may read and not list is refused what is absent, too.
            listed, absent = None, CheckpointError
        names = USUAL_NAMES if listed is None else [n for n in listed if is_companion(n)]
        found: dict[str, bytes] = {}
        for name in dict.fromkeys((*more, *names)):
            if listed is not None and name not in listed:
                continue
            try:
                with open_file(join(folder, name)) as file:
                    if file.size_bytes <= _MAX_BYTES:
                        found[name] = file.read(0, file.size_bytes)
            except absent:
                continue
        return found
    finally:
        leave_site(site)


@contextmanager
def folder_here(path: str | os.PathLike[str], reach: Reach = AT_HAND) -> Iterator[str]:
    """The folder of a checkpoint's small files, for libraries that read them by their paths.

    Those of a remote checkpoint lie in a temporary folder for as long as the context.
    """
    given = os.fsdecode(path)
    if not is_url(given) and not (is_hub_name(given) and reach.download is False):
        yield folder_of(given)
        return
    if not is_url(given):
        try:
            yield find_in_hub_cache(given)
            return
        except CheckpointNotFoundError:
            pass
    from streamload.sources.remote.remote_folder import site_for

    with using(site_for(given, reach)) as site, tempfile.TemporaryDirectory() as here:
        for name, data in read_companions(folder_of(site.address), "config.json").items():
            target = os.path.join(here, *name.split("/"))
            if any(part in ("", ".", "..") for part in name.split("/")):
                raise CheckpointError(f"lists the odd name {name!r}", path=site.address)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.write(data)
        yield here
