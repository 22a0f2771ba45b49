"""One row per loader, from the lines of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamload.measuring.own_peers import FLOORS
from streamload.measuring.rounds import disturbances, medians

_MEDIANS = (
    "import_s", "load_s", "first_use_s", "total_s", "bytes_per_s",
    "peak_rss_bytes", "peak_anonymous_bytes", "peak_file_bytes", "peak_cgroup_bytes",
)  # fmt: skip
_FINE = ("right", "none kept", "not checked")


@dataclass(frozen=True)
class Row:
    """One loader's rounds together: medians, and the spread of the headline.

    Attributes:
        reason: why there are no figures; None if there are.
        applies: False if the loader has no part in this run: nothing is wrong with it.
        times_floor: its time over the floor's; None without a floor.
    """

    label: str
    delivers: str
    reason: str | None
    median: dict[str, Any] | None = None
    total_range_s: tuple[float, float] = (0.0, 0.0)
    rounds: int = 0
    values: str = ""
    applies: bool = True
    times_floor: float | None = None

    @property
    def is_floor(self) -> bool:
        return self.label.startswith("floor")

    @property
    def is_ours(self) -> bool:
        return self.label.startswith("streamload")

    @property
    def is_bad(self) -> bool:
        """Something a reader must not overlook: no figures, or wrong values."""
        return self.applies and (self.median is None or self.values not in _FINE)


def rows_of(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """The floor first, then by time, then those that failed, then those that do not apply."""
    by_peer: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["kind"] == "load":
            by_peer.setdefault(line["peer"], []).append(line)
    rows = [_row(measured) for measured in by_peer.values()]
    floor_s = _floor_s(rows)
    rows = [_beside(row, floor_s) for row in rows]

    def order(row: Row) -> tuple[bool, bool, bool, float]:
        total_s = row.median["total_s"] if row.median else 0.0
        return (not row.applies, row.median is None, not row.is_floor, total_s)

    return sorted(rows, key=order)


def measured_rows(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """Those that have figures."""
    return [row for row in rows_of(lines) if row.median is not None]


def _row(measured: list[dict[str, Any]]) -> Row:
    label, delivers = measured[0]["label"], measured[0]["delivers"]
    median = medians(measured, _MEDIANS)
    if not median["ok"]:
        failed = sum(not line["ok"] for line in measured)
        rounds = f"{failed} of {len(measured)} rounds: " if failed < len(measured) else ""
        applies = all(line.get("applies", True) for line in measured)
        return Row(label, delivers, rounds + median["reason"], applies=applies)
    low, high = median["total_range_s"]
    said = [line["values"] for line in measured]
    wrong = [values for values in said if values not in _FINE]
    return Row(label, delivers, None, median, (low, high), len(measured), [*wrong, *said][0])


def _floor_s(rows: Sequence[Row]) -> float | None:
    """Of reading and casting; of reading alone where that was not measured."""
    seconds = {row.label: row.median["total_s"] for row in rows if row.median}
    for what in ("read + cast", "read"):
        if found := seconds.get(FLOORS[what].label):
            return float(found)
    return None


def _beside(row: Row, floor_s: float | None) -> Row:
    if row.median is None or floor_s is None:
        return row
    return replace(row, times_floor=row.median["total_s"] / floor_s)


def warnings_of(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader must know about how the figures came about."""
    problems = sorted({x["cache_problem"] for x in lines[1:] if x["ok"] and x.get("cache_problem")})
    stayed = [f"The page cache could not be dropped: {'; '.join(problems)}."] if problems else []
    return stayed + disturbances(lines[1:], lines[0]["machine"]["cpus"])
