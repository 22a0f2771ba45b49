"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["gib"]


def gib(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1, two decimals above KiB."""
    for unit, shift, digits in (("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.{digits}f} {unit}"
    return f"{nbytes} B"
