"""Assignments, stored name to module name, with what repeats from block to block folded."""

from __future__ import annotations

from collections.abc import Iterable

from streamload.cli.render.folding import fold
from streamload.cli.render.tables import columns
from streamload.core.errors import printable
from streamload.core.report import LoadedTensor

__all__ = ["ledger_lines"]


def ledger_lines(loaded: Iterable[LoadedTensor]) -> list[str]:
    """A table of assignments: module name, from where, shape, cast, transform."""
    rows = fold((printable(entry.name), _detail(entry)) for entry in loaded)
    cells: list[tuple[str, ...]] = []
    block: object = ()
    for row in rows:
        if row.block and row.block != block:
            cells.append((row.block_text(),))
        block = row.block
        name = "  " + row.name_text(len(row.block)) if row.block else row.name_text()
        cells.append((name, *row.detail))
    return columns(cells)


def _detail(entry: LoadedTensor) -> tuple[str, str, str, str]:
    """What assignments of one kind share: the block's number is replaced by N."""
    number = next((part for part in entry.name.split(".") if part.isdigit()), None)
    sources = " + ".join(_without_number(printable(name), number) for name in entry.sources)
    cast = entry.dtype
    if entry.stored_dtype != entry.dtype:
        cast = f"{entry.stored_dtype} → {entry.dtype}"
    return f"← {sources}", str(list(entry.shape)), cast, entry.transform


def _without_number(name: str, number: str | None) -> str:
    parts = name.split(".")
    if number in parts:
        parts[parts.index(number)] = "N"
    return ".".join(parts)
