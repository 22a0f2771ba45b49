"""Assignments, stored name to module name, with those that repeat in every block folded."""

from __future__ import annotations

from collections.abc import Iterable

from streamload.cli.render.tables import columns
from streamload.core.display.assignments import assignment_rows
from streamload.core.report import LoadedTensor


def ledger_lines(loaded: Iterable[LoadedTensor]) -> list[str]:
    """A table of assignments: module name, from where, shape, cast, transform."""
    rows = assignment_rows(loaded)
    return columns(rows, least={0: 16, 1: 12}, drop={4: "transforms", 3: "dtypes", 1: "sources"})
