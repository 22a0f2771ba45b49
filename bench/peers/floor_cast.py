"""The floor of loading: the same reading, and every block cast into memory never used before."""

from __future__ import annotations

from typing import Any

from bench.floor import read_and_cast

LABEL = "floor: read + cast"
DELIVERS = "tensors, stored layout"


def load(job: Any) -> Any:
    return read_and_cast(job)
