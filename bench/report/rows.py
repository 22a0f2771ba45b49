"""One row per loader, from the lines of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamload.measuring.rounds import disturbances, medians

_MEDIANS = (
    "import_s", "load_s", "first_use_s", "total_s", "bytes_per_s",
    "peak_rss_bytes", "peak_anonymous_bytes", "peak_file_bytes", "peak_cgroup_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One loader's rounds together: medians, and the spread of the headline."""

    label: str
    delivers: str
    reason: str | None
    median: dict[str, Any] | None = None
    total_range_s: tuple[float, float] = (0.0, 0.0)
    values: str = ""


def rows_of(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """The floor first, then by time, then those that failed."""
    by_peer: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["kind"] == "load":
            by_peer.setdefault(line["peer"], []).append(line)
    rows = [_row(measured) for measured in by_peer.values()]

    def order(row: Row) -> tuple[bool, bool, float]:
        total_s = row.median["total_s"] if row.median else 0.0
        return (row.median is None, not row.label.startswith("floor"), total_s)

    return sorted(rows, key=order)


def _row(measured: list[dict[str, Any]]) -> Row:
    label, delivers = measured[0]["label"], measured[0]["delivers"]
    median = medians(measured, _MEDIANS)
    if not median["ok"]:
        failed = sum(not line["ok"] for line in measured)
        rounds = f"{failed} of {len(measured)} rounds: " if failed < len(measured) else ""
        return Row(label, delivers, rounds + median["reason"])
    low, high = median["total_range_s"]
    said = [line["values"] for line in measured]
    wrong = [values for values in said if values not in ("right", "none kept")]
    return Row(label, delivers, None, median, (low, high), [*wrong, *said][0])


def warnings_of(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader must know about how the figures came about."""
    problems = sorted({x["cache_problem"] for x in lines[1:] if x["ok"] and x.get("cache_problem")})
    stayed = [f"The page cache could not be dropped: {'; '.join(problems)}."] if problems else []
    return stayed + disturbances(lines[1:], lines[0]["machine"]["cpus"])
