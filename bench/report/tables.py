"""Rows as text: a table that is also Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from bench.report.rows import Row, rows_of, warnings_of

COLUMNS = (
    "loader", "load + first use s", "min-max", "import s", "load s", "first use s", "GB/s",
    "peak RSS MiB", "anonymous", "file", "cgroup", "values", "delivers",
)  # fmt: skip
NUMERIC = range(1, 11)


def report(lines: Sequence[dict[str, Any]]) -> str:
    """The setting, the table and the warnings of one comparison."""
    return document(lines, COLUMNS, [cells(row) for row in rows_of(lines)], NUMERIC)


def document(
    lines: Sequence[dict[str, Any]],
    columns: Sequence[str],
    body: Sequence[Sequence[str]],
    numeric: Iterable[int],
    more: Sequence[str] = (),
) -> str:
    """The setting, an aligned Markdown table, ``more`` lines, and the warnings."""
    warnings = [f"Note: {text}" for text in warnings_of(lines)]
    table = render(columns, body, numeric)
    return "\n".join([setting(lines[0]), "", table, *more, *([""] if warnings else []), *warnings])


def setting(head: dict[str, Any]) -> str:
    """One paragraph: what was measured, on what, with which versions."""
    where = head["machine"]
    memory = f", {where['memory_bytes'] / 2**30:.0f} GiB" if where["memory_bytes"] else ""
    cache = (
        "page cache dropped before each (posix_fadvise)" if head.get("cold") else "page cache warm"
    )
    limit = f", limit {head['limit_bytes'] >> 20} MiB" if head.get("limit_bytes") else ""
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    return (
        f"{head['path']} to {head['dtype'] or 'its stored dtype'}, {head['workers']} workers, "
        f"{head['rounds']} rounds, {cache}{limit}. {where['cpu']}, {where['cpus']} CPUs{memory}, "
        f"{where['system']}, {where['filesystem']}, Python {where['python']}, {versions}, "
        f"commit {where['commit']}, {head['started']}."
    )


def render(head: Sequence[str], body: Sequence[Sequence[str]], numeric: Iterable[int]) -> str:
    right = set(numeric)
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]

    def one(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(aligned)} |"

    rule = [f"{'-' * (w - 1)}:" if i in right else "-" * w for i, w in enumerate(widths)]
    return "\n".join([one(head), f"| {' | '.join(rule)} |", *map(one, body)])


def cells(row: Row) -> list[str]:
    if row.median is None:
        empty = [""] * (len(COLUMNS) - 3)
        return [row.label, *empty, _short(row.reason or "failed"), row.delivers]
    m = row.median
    low, high = row.total_range_s
    return [
        row.label,
        _seconds(m["total_s"]),
        f"{_seconds(low)}-{_seconds(high)}",
        _seconds(m["import_s"]),
        _seconds(m["load_s"]),
        _seconds(m["first_use_s"]),
        f"{m['bytes_per_s'] / 1e9:.2f}",
        *(_mib(m.get(f"peak_{part}_bytes")) for part in ("rss", "anonymous", "file", "cgroup")),
        _short(row.values),
        row.delivers,
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _mib(value: float | None) -> str:
    return "?" if value is None else f"{value / 2**20:.0f}"


def _short(text: str, width: int = 60) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= width else text[: width - 3] + "..."
