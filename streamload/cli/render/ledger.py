"""Assignments, stored name to module name, with those that repeat in every block folded."""

from __future__ import annotations

from collections.abc import Iterable

from streamload.cli.render.folding import by_block, fold
from streamload.cli.render.tables import columns
from streamload.core.report import LoadedTensor
from streamload.core.wording import joined, printable


def ledger_lines(loaded: Iterable[LoadedTensor]) -> list[str]:
    """A table of assignments: module name, from where, shape, cast, transform."""
    rows = fold((printable(entry.name), _detail(entry)) for entry in loaded)
    return columns(list(by_block(rows, lambda row: (row.block_text(),), lambda detail: detail)))


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
