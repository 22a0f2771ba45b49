"""Assignments as rows of a table, with those that repeat in every block folded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from streamload.core.display.folding import by_block, fold
from streamload.core.wording import joined, printable

if TYPE_CHECKING:
    from streamload.core.report import LoadedTensor


def assignment_rows(loaded: Iterable[LoadedTensor]) -> list[tuple[str, ...]]:
    """Cells: module name, from where, shape, cast, transform; a block's heading is one cell."""
    rows = fold((printable(entry.name), _detail(entry)) for entry in loaded)
    return list(by_block(rows, lambda row: (row.block_text(),), lambda detail: detail))


def _detail(entry: LoadedTensor) -> tuple[str, str, str, str]:
    """What assignments of one kind share: the block's number is replaced by N."""
    number = next((part for part in entry.name.split(".") if part.isdigit()), None)
    sources = joined(_without_number(printable(name), number) for name in entry.sources)
    cast = entry.dtype
    if entry.stored_dtype != entry.dtype:
        cast = f"{entry.stored_dtype} → {entry.dtype}"
    return f"← {sources}", str(list(entry.shape)), cast, entry.transform


def _without_number(name: str, number: str | None) -> str:
    parts = name.split(".")
    if number in parts:
        parts[parts.index(number)] = "N"
    return ".".join(parts)
