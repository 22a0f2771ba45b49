"""streamload, map."""

from __future__ import annotations

from typing import Any

from bench import streamload_peer
from bench.streamload_peer import imports, stored

__all__ = ["DELIVERS", "IMPORTS", "LABEL", "imports", "load", "stored"]

LABEL = "streamload map"
DELIVERS = "module, views of the file where it can"
IMPORTS = ("torch", "streamload")


def load(job: Any) -> Any:
    return streamload_peer.load(job, mode="map")
