"""What commands print: columns of plain text, bold only on a terminal that wants it, or JSON.

All text leaves through ``say``: names of tensors, files and models are anybody's, and what a
terminal would take for a command is escaped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence

import click

from streamload.core.wording import printable, printable_lines

# What a heading stands between until it is printed: no file can hold these marks.
_BOLD, _PLAIN = (f"\0{os.urandom(8).hex()}\0" for _ in range(2))
# They join letters and signs in many languages, and are no commands.
_JOINERS = "\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"


def say(text: str = "", *, err: bool = False, end: str = "\n") -> None:
    """Print, escaped but for line breaks, tabs and joiners; headings are bold where that shows and
    NO_COLOR is not set.
    """
    color = False if os.environ.get("NO_COLOR") else None
    shown = ""
    for part in re.split(f"({_BOLD}|{_PLAIN})", text):
        style = {_BOLD: "\x1b[1m", _PLAIN: "\x1b[0m"}.get(part)
        shown += printable_lines(part, kept=_JOINERS) if style is None else style
    click.echo(shown + end, err=err, color=color, nl=False)


def say_result(
    as_json: bool, to_dict: Callable[[], Mapping[str, object]], to_text: Callable[[], str]
) -> None:
    """Print a command's result on stdout, in the one form that was asked for."""
    say(json.dumps(to_dict()) if as_json else to_text())


def heading(text: str) -> str:
    return f"{_BOLD}{printable(text)}{_PLAIN}"


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Lines with the cells of each column aligned, those of the columns ``right`` to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    count = max((len(row) for row in rows), default=0)
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(count)]
    return [
        "  ".join(
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
