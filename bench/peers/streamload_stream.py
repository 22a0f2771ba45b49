"""streamload, stream, contiguous weights."""

from __future__ import annotations

from typing import Any

from bench import streamload_peer
from bench.streamload_peer import imports, stored

__all__ = ["DELIVERS", "IMPORTS", "LABEL", "imports", "load", "stored"]

LABEL = "streamload stream"
DELIVERS = "module, contiguous"
IMPORTS = ("torch", "streamload")


def load(job: Any) -> Any:
    return streamload_peer.load(job)
