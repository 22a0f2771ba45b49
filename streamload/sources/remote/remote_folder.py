"""What is in a folder at an address: listed by buckets and the hub, asked for by name elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from streamload.core.errors import CheckpointError
from streamload.core.options import Reach
from streamload.sources.folders import LOCAL_FILE
from streamload.sources.remote.answers import RefusedError
from streamload.sources.remote.hub_site import hub_site
from streamload.sources.remote.registry import find_site, leave_site
from streamload.sources.remote.sites import TIMEOUT_S, Site
from streamload.sources.remote.urls import is_file_address, is_url, parent, parse_url

_AT_ONCE = 8
# In the order in which files of a folder are chosen; the first that is there is enough.
_PROBED = (
    *("model.safetensors.index.json", "model.safetensors", LOCAL_FILE),
    *("pytorch_model.bin.index.json", "pytorch_model.bin"),
)


def site_for(given: str, reach: Reach) -> Site:
    """The site of a checkpoint, for ``using``.

    Args:
        given: an address, or ``hf:ORG/NAME[@REVISION]``.
        reach: how long to wait.

    Raises:
        CheckpointError: it is no address.
        CheckpointNotFoundError: the hub has no such model.
    """
    timeout_s = reach.timeout_s or TIMEOUT_S
    if not is_url(given):
        return hub_site(given, timeout_s)
    url = parse_url(given)
    folder = parse_url(parent(url.shown) if is_file_address(given) else url.shown)
    return Site(url.at(folder.path), timeout_s, address=url.shown)


def is_folder_at(address: str) -> bool:
    """True if an address without a file's ending is that of a folder.

    Raises:
        CheckpointError: the server does not let us know.
    """
    if address.endswith("/") or names_at(address):
        return True
    url = parse_url(address)
    site = find_site(url)
    try:
        site.head(url.path)
    except RefusedError:
        return True  # to be told what was looked for in it
    finally:
        leave_site(site)
    return False


def names_at(folder: str) -> list[str]:
    """The files in a folder; of a server that does not list them, the best one that it has.

    Raises:
        CheckpointError: it cannot be listed.
    """
    url = parse_url(folder)
    site = find_site(url)
    try:
        listed = site.names(url.path)
        if listed is not None:
            return sorted(name for name in listed if "/" not in name)
        start = url.path.rstrip("/")
        return next(([name] for name in _PROBED if _is_there(site, f"{start}/{name}")), [])
    except RefusedError as error:
        raise CheckpointError(str(error), path=url.shown) from error
    finally:
        leave_site(site)


def are_there(addresses: Sequence[str]) -> list[bool]:
    """Which of some files of one folder are there; all are asked for, several at a time.

    Raises:
        CheckpointError: the server does not let us know.
    """

    def ask(address: str) -> bool:
        try:
            return _is_there(site, parse_url(address).path)
        except RefusedError as error:
            raise CheckpointError(str(error), path=address) from error

    site = find_site(parse_url(addresses[0]))
    try:
        with ThreadPoolExecutor(min(len(addresses), _AT_ONCE)) as pool:
            return list(pool.map(ask, addresses))
    finally:
        leave_site(site)


def _is_there(site: Site, path: str) -> bool:
    try:
        site.head(path)
    except RefusedError as error:
        if error.is_absent:
            return False
        raise
    return True
