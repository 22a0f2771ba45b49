"""Columns of plain text that fit the terminal, and a command's result as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from streamload.cli.render.terminal import cells, heading, is_quiet, say, shortened, width_of
from streamload.core.wording import printable

__all__ = ["columns", "heading", "say", "say_report", "say_result"]

_GAP = 2
Columns: TypeAlias = "frozenset[int]"


def say_result(
    as_json: bool, to_dict: Callable[[], Mapping[str, object]], to_text: Callable[[], str]
) -> None:
    """Print a command's result on stdout, in the one form that was asked for."""
    if as_json:
        say(json.dumps(to_dict()), raw=True)
    else:
        say(to_text())


def say_report(
    as_json: bool, to_dict: Callable[[], Mapping[str, object]], to_text: Callable[[], str]
) -> None:
    """As ``say_result`` of what a command did, which ``--quiet`` leaves unsaid."""
    if as_json or not is_quiet():
        say_result(as_json, to_dict, to_text)


def columns(
    rows: Sequence[Sequence[str]],
    *,
    right: Columns = frozenset(),
    least: Mapping[int, int] | None = None,
    drop: Mapping[int, str] | None = None,
) -> list[str]:
    """Lines with the cells of each column aligned; on a terminal they fit its width.

    Args:
        rows: cells of text.
        right: columns that are aligned to the right, as numbers are.
        least: column → how narrow it may become; its cells are then shortened in the middle.
        drop: column → what it is called; where it is still too narrow they are left out, the first
            one first, and a last line says so.
    """
    table = [[printable(cell) for cell in row] for row in rows]
    widths = _widths(table)
    room, left_out = width_of(), []
    for column, name in (drop or {}).items():
        if room is None or _least_total(widths, least or {}) <= room:
            break
        left_out.append(name)
        widths[column] = 0
        for row in table:
            row[column : column + 1] = [""] * (column < len(row))
    if room is not None:
        widths = _fitted(widths, least or {}, room)
    lines = [_line(row, widths, right) for row in table]
    return [*lines, f"(no room here for: {', '.join(left_out)})"] if left_out else lines


def _line(row: Sequence[str], widths: Sequence[int], right: Columns) -> str:
    shown = []
    for at, (cell, width) in enumerate(zip(row, widths, strict=False)):
        if not width:
            continue
        text = shortened(cell, width)
        padding = " " * (width - cells(text))
        shown.append(padding + text if at in right else text + padding)
    return (" " * _GAP).join(shown).rstrip()


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    count = max(map(len, table), default=0)
    return [max((cells(row[i]) for row in table if i < len(row)), default=0) for i in range(count)]


def _total(widths: Sequence[int]) -> int:
    shown = [width for width in widths if width]
    return sum(shown) + _GAP * (len(shown) - 1)


def _least_total(widths: Sequence[int], least: Mapping[int, int]) -> int:
    return _total([min(width, least.get(at, width)) for at, width in enumerate(widths)])


def _fitted(widths: Sequence[int], least: Mapping[int, int], room: int) -> list[int]:
    """The widths with those that may shrink cut, the widest first, until all fit."""
    fitted = list(widths)
    while (excess := _total(fitted) - room) > 0:
        able = [at for at in least if at < len(fitted) and fitted[at] > least[at]]
        if not able:
            break
        widest = max(able, key=lambda at: fitted[at])
        others = max((fitted[at] for at in able if at != widest), default=0)
        # Down to the next widest at once, then by turns.
        step = min(excess, max(fitted[widest] - others, 1), fitted[widest] - least[widest])
        fitted[widest] -= step
    return fitted
