"""The floor of reading: what the model needs of the file, and nothing done with it."""

from __future__ import annotations

from typing import Any

from bench.floor import read_only

LABEL = "floor: read"
DELIVERS = "nothing"


def load(job: Any) -> Any:
    return read_only(job)
