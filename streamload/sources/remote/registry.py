"""Which sites are open, and for how many files: what holds one closes it when it is the last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from streamload.sources.remote.sites import TIMEOUT_S, Site
from streamload.sources.remote.urls import Url

_lock = threading.RLock()  # a collection may close a file while another is opened
_sites: list[Site] = []


def find_site(url: Url) -> Site:
    """The site of a file, that of the load it belongs to if there is one; for ``leave_site``."""
    with _lock:
        for site in reversed(_sites):
            if site.covers(url):
                site.users += 1
                return site
        return _added(Site(url, TIMEOUT_S))


@contextmanager
def using(site: Site) -> Iterator[Site]:
    """Have files below the site's folder read through it, those too that stay open behind this."""
    with _lock:
        _added(site)
    try:
        yield site
    finally:
        leave_site(site)


def leave_site(site: Site, *, wait: bool = True) -> None:
    """One file less: the last one closes all connections."""
    with _lock:
        site.users -= 1
        if site.users:
            return
        _sites.remove(site)
    site.close() if wait else site.stop()


def _added(site: Site) -> Site:
    site.users += 1
    _sites.append(site)
    return site
