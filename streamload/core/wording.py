"""How messages are worded: what a terminal can show, short lists, counts and sizes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

_LONGEST_COMPARED = 256
_MOST_COMPARED = 2000
_ALIKE = 0.6
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#]*@)?([^?#]*)(?:[?#].*)?", re.DOTALL)


def without_secrets(path: str) -> str:
    """An address without user part and query, which may hold credentials; other paths as given."""
    match = _ADDRESS.fullmatch(path)
    return match[1] + match[2] if match else path


def printable(text: str | bytes | os.PathLike[str]) -> str:
    """Text that any stream can print on one line: surrogates and control characters are escaped,
    those that turn the direction of writing (Unicode's bidirectional ones) included.
    """
    shown = os.fsdecode(text)
    if shown.isprintable():
        return shown
    shown = shown.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def printable_lines(text: str, *, kept: str = "") -> str:
    """As ``printable``, but line breaks and the characters ``kept`` stay."""
    lines = text.split("\n")
    for at, line in enumerate(lines):
        if not line.isprintable():
            lines[at] = "".join(c if c in kept else printable(c) for c in line)
    return "\n".join(lines)


def format_bytes(count: float) -> str:
    """Bytes as people read them, in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def shortened(text: str, most: int) -> str:
    """The text, its middle left out where it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


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


def section(
    title: str, rows: Sequence[str], most: int | None = None, *, fate: str = ""
) -> list[str]:
    """Lines: the title with the count, then a row each, the first ``most``; none without rows.

    ``fate`` says what became of all of them.
    """
    if not rows:
        return []
    shown = rows[:most]
    lines = [f"{title} ({len(rows)}){f', {fate}' if fate else ''}:", *(f"  {row}" for row in shown)]
    if len(shown) < len(rows):
        lines.append(f"  … and {len(rows) - len(shown)} more")
    return lines


def suggestion(name: str, known: Iterable[str], most: int = 1) -> str:
    """``; did you mean 'load'?``, or nothing if no known name is close."""
    close = near_names(name, known, most)
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ""


def near_names(name: str, known: Iterable[str], most: int) -> list[str]:
    """Known names that share the most whole segments (between dots), of these the most alike.

    Whole segments first: ``h.1.attn.c_atn.weight`` is meant to be of block 1, and ``c_attn`` is
    found wherever it is a segment.
    """
    if len(name) > _LONGEST_COMPARED:
        return []  # the comparison is quadratic
    import difflib

    wanted = set(name.split("."))
    lacking: dict[int, list[str]] = {}
    for one in known:
        lacking.setdefault(len(wanted.difference(one.split("."))), []).append(one)
    if not lacking:
        return []
    least = min(lacking)
    matcher = difflib.SequenceMatcher(b=name, autojunk=False)
    alike: list[tuple[float, str]] = []
    for one in lacking[least][:_MOST_COMPARED]:
        matcher.set_seq1(one[:_LONGEST_COMPARED])
        ratio = matcher.ratio()
        if not least or ratio >= _ALIKE:
            alike.append((ratio, one))
    return [one for _, one in sorted(alike, key=lambda pair: -pair[0])[:most]]
