"""A load's report, as commands print it."""

from __future__ import annotations

from streamload.cli.failures import as_options
from streamload.cli.render.tables import columns
from streamload.cli.render.terminal import width_of
from streamload.core.report import LoadReport
from streamload.core.wording import joined


def report_text(report: LoadReport, *, verbose: bool = False) -> str:
    """A few lines; with ``verbose`` every assignment, on a terminal as a table that fits it."""
    if not verbose or width_of() is None:
        return as_options(report.to_text(verbose=verbose))
    summary, _, rest = as_options(report.to_text()).partition("\n")
    rows = [
        (
            joined(entry.sources),
            f"→ {entry.name}",
            str(list(entry.shape)),
            entry.dtype
            if entry.dtype == entry.stored_dtype
            else f"{entry.stored_dtype} → {entry.dtype}",
            entry.transform,
        )
        for entry in report.loaded
    ]
    left_out = {4: "transforms", 3: "dtypes", 2: "shapes"}
    table = columns(rows, least={0: 14, 1: 14}, drop=left_out)
    return "\n".join([summary, *table, *filter(None, [rest])])
