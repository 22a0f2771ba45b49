"""Whether the extra is there; asking brings neither it nor torch."""

from __future__ import annotations

from importlib.util import find_spec


def is_installed() -> bool:
    return find_spec("transformers") is not None
