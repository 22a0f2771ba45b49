"""Columns of plain text; bold only on a terminal that wants it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

__all__ = ["columns", "heading", "say"]


def say(text: str = "", *, err: bool = False) -> None:
    """Print; styles are taken off where they would not show, or where NO_COLOR is set."""
    color = False if os.environ.get("NO_COLOR") else None
    click.echo(text, err=err, color=color)


def heading(text: str) -> str:
    """A heading's style."""
    return click.style(text, bold=True)


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Lines with the cells of a column at one place; columns in ``right`` end at one place."""
    count = max((len(row) for row in rows), default=0)
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(count)]
    return [
        "  ".join(
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
