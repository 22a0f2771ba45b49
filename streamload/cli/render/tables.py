"""What commands print: columns of plain text, bold only on a terminal that wants it, or JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence

import click


def say(text: str = "", *, err: bool = False) -> None:
    """Print; styles are taken off where they would not show, or where NO_COLOR is set."""
    color = False if os.environ.get("NO_COLOR") else None
    click.echo(text, err=err, color=color)


def say_result(
    as_json: bool, to_dict: Callable[[], Mapping[str, object]], to_text: Callable[[], str]
) -> None:
    """Print a command's result on stdout, in the one form that was asked for."""
    say(json.dumps(to_dict()) if as_json else to_text())


def heading(text: str) -> str:
    return click.style(text, bold=True)


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Lines with the cells of each column aligned, those of the columns ``right`` to the right."""
    count = max((len(row) for row in rows), default=0)
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(count)]
    return [
        "  ".join(
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
