"""How messages are worded: what a terminal can show, short lists, counts and sizes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence


def printable(text: str | bytes | os.PathLike[str]) -> str:
    """Text that any stream can print: surrogates and control characters are escaped."""
    shown = os.fsdecode(text)
    shown = shown.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def format_bytes(count: int) -> str:
    """Bytes as people read them, in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def plural(count: int, one: str, several: str | None = None) -> str:
    """``1 file``, ``2 files``; ``several`` where an s does not make the plural."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def listed(
    values: Iterable[object],
    most: int = 8,
    *,
    separator: str = ", ",
    more: str = " and {left} more",
) -> str:
    """The first ``most`` values; ``more`` says how many are ``{left}`` out, of ``{total}``."""
    items = [str(value) for value in values]
    shown = separator.join(items[:most])
    left = len(items) - most
    return shown + more.format(left=left, total=len(items)) if left > 0 else shown


def joined(names: Iterable[str]) -> str:
    """The sources of a tensor: all of a few, the first of many experts."""
    return listed(names, 4, separator=" + ", more=" + … ({total} in all)")


def section(title: str, rows: Sequence[str], most: int | None = None) -> list[str]:
    """Lines: the title with the count, then a row each, the first ``most``; none without rows."""
    if not rows:
        return []
    shown = rows[:most]
    lines = [f"{title} ({len(rows)}):", *(f"  {row}" for row in shown)]
    if len(shown) < len(rows):
        lines.append(f"  … and {len(rows) - len(shown)} more")
    return lines


def suggestion(name: str, known: Iterable[str], most: int = 1) -> str:
    """``; did you mean 'load'?``, or nothing if no known name is close."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=most)
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ""
