"""Rows as text: a table that is also Markdown, and one that fits a terminal."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from bench.report.labels import shortened
from bench.report.rows import Row, rows_of, warnings_of
from streamload.core.wording import plural, printable

COLUMNS = (
    "loader", "load + use s", "x floor", "min-max", "import s", "load s", "first use s",
    "GB/s", "peak RSS MiB", "anonymous", "file", "cgroup", "values", "delivers",
)  # fmt: skip
NUMERIC = range(1, 12)
DROPPED = (
    "delivers", "cgroup", "GB/s", "import s", "file", "first use s", "load s", "anonymous",
    "min-max", "x floor", "peak RSS MiB",
)  # fmt: skip
"""What a terminal that is too narrow goes without, first that which is missed least."""


def report(lines: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """The setting, the table and the warnings of one comparison.

    Where the ``width`` is bounded, what has no figures is told below the table, in whole.
    """
    rows = rows_of(lines)
    shown = rows if width is None else [row for row in rows if row.median is not None]
    left = [f"{_word(row.label)}: {printable(why_not(row))}" for row in rows if row not in shown]
    body = [cells(row) for row in shown]
    more = ["", *left] if left else []
    return document(lines, COLUMNS, body, NUMERIC, more, width=width, dropped=DROPPED)


def document(
    lines: Sequence[dict[str, Any]],
    columns: Sequence[str],
    body: Sequence[Sequence[str]],
    numeric: Iterable[int],
    more: Sequence[str] = (),
    *,
    width: int | None = None,
    dropped: Sequence[str] = (),
) -> str:
    """The setting, an aligned Markdown table, ``more`` lines, and the warnings.

    No line is longer than ``width``: columns are left out in the order of ``dropped``, and text is
    broken into lines.
    """
    warnings = [f"Note: {printable(text)}" for text in warnings_of(lines)]
    if width is None:
        table = render(columns, body, numeric)
    else:
        table = render(*_fitted(columns, body, numeric, dropped, width))
    paragraphs = [
        printable(setting(lines[0])),
        "",
        table,
        *more,
        *([""] if warnings else []),
        *warnings,
    ]
    if width is None:
        return "\n".join(paragraphs)
    return "\n".join(p if p is table else textwrap.fill(p, max(20, width)) for p in paragraphs)


def title(head: dict[str, Any]) -> str:
    """What was done with what: ``gpt2 to bfloat16``."""
    return f"{head['path']} to {head['dtype'] or 'its stored dtype'}"


def circumstances(head: dict[str, Any]) -> list[str]:
    """What the figures depend on in a word each: machine, workers, page cache, rounds, day."""
    where = head["machine"]
    cpu = str(where["cpu"]).replace("(R)", "").replace("(TM)", "")
    memory = f", {where['memory_bytes'] / 2**30:.0f} GiB" if where["memory_bytes"] else ""
    limit = [f"limit {head['limit_bytes'] >> 20} MiB"] if head.get("limit_bytes") else []
    which = "fastest" if head.get("command") == "scale" else "median"
    rounds = f"{which} of {head['rounds']} rounds" if head["rounds"] > 1 else "one round"
    return [
        f"{' '.join(cpu.split())}, {plural(where['cpus'], 'CPU')}{memory}",
        plural(head["workers"], "worker"),
        f"page cache {'dropped' if head.get('cold') else 'warm'}",
        *limit,
        rounds,
        head["started"][:10],
    ]


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
        f"{title(head)}, {plural(head['workers'], 'worker')}, "
        f"{plural(head['rounds'], 'round')}, {cache}{limit}. {where['cpu']}, "
        f"{plural(where['cpus'], 'CPU')}{memory}, "
        f"{where['system']}, {where['filesystem']}, Python {where['python']}, {versions}, "
        f"commit {where['commit']}, {head['started']}."
    )


def render(head: Sequence[str], body: Sequence[Sequence[str]], numeric: Iterable[int]) -> str:
    right = set(numeric)
    widths = _widths(head, body)

    def one(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(aligned)} |"

    rule = [f"{'-' * (w - 1)}:" if i in right else "-" * w for i, w in enumerate(widths)]
    return "\n".join([one(head), f"| {' | '.join(rule)} |", *map(one, body)])


def _widths(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]


def _fitted(
    head: Sequence[str],
    body: Sequence[Sequence[str]],
    numeric: Iterable[int],
    dropped: Sequence[str],
    width: int,
) -> tuple[list[str], list[list[str]], set[int]]:
    """The same table no wider than ``width``, as ``render`` takes it.

    Columns are left out in the order of ``dropped`` as long as words cut to a sixth of the room
    are too wide; words then share what is left over.
    """
    right, widths = set(numeric), _widths(head, body)
    least = [w if i in right else min(w, max(8, width // 6)) for i, w in enumerate(widths)]
    kept = list(range(len(head)))

    def left_over() -> int:
        return width - 1 - sum(least[i] + 3 for i in kept)

    for name in dropped:
        if left_over() < 0:
            kept = [i for i in kept if head[i] != name]
    for i in kept:
        least[i] += max(0, min(widths[i] - least[i], left_over()))
    return (
        [shortened(head[i], least[i]) for i in kept],
        [[shortened(row[i], least[i]) for i in kept] for row in body],
        {place for place, i in enumerate(kept) if i in right},
    )


def cells(row: Row) -> list[str]:
    if row.median is None:
        empty = [""] * (len(COLUMNS) - 3)
        return [_word(row.label), *empty, _short(why_not(row)), _word(row.delivers)]
    m = row.median
    low, high = row.total_range_s
    return [
        _word(row.label),
        _seconds(m["total_s"]),
        "" if row.times_floor is None else f"{row.times_floor:.2f}",
        f"{_seconds(low)}-{_seconds(high)}" if row.rounds > 1 else "",
        _seconds(m["import_s"]),
        _seconds(m["load_s"]),
        _seconds(m["first_use_s"]),
        "?" if m["bytes_per_s"] is None else f"{m['bytes_per_s'] / 1e9:.2f}",
        *(_mib(m.get(f"peak_{part}_bytes")) for part in ("rss", "anonymous", "file", "cgroup")),
        _short(row.values),
        _word(row.delivers),
    ]


def why_not(row: Row) -> str:
    """Why a row has no figures."""
    return ("" if row.applies else "does not apply: ") + (row.reason or "failed")


def _seconds(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _mib(value: float | None) -> str:
    return "?" if value is None else f"{value / 2**20:.0f}"


def _word(text: str) -> str:
    """As one cell of a table, whatever it holds."""
    return printable(text).replace("|", "/")


def _short(text: str, width: int = 60) -> str:
    return shortened(_word(text), width)
