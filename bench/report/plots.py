"""Pictures of the figures: readable in black and white, and at 830 pixels."""

import io
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from matplotlib import pyplot

from bench.report.rows import Row, rows_of

WIDTH_INCHES = 8.3
DPI = 200
"""Twice what a README shows, for dense screens."""
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.7,
}
OURS, OTHERS, LIGHT = "#1b5e8c", "#8c8c8c", "#e3e3e3"
MIB = 1 << 20


def save_all(lines: Sequence[dict[str, Any]], stem: str) -> list[str]:
    """Writes ``STEM-time-memory.png`` and ``STEM-over-time.png``; returns their paths."""
    written = []
    for name, draw in (("time-memory", time_and_memory), ("over-time", memory_over_time)):
        path = f"{stem}-{name}.png"
        with open(path, "wb") as file:
            file.write(draw(lines))
        written.append(path)
    return written


def time_and_memory(lines: Sequence[dict[str, Any]]) -> bytes:
    """Bars: load and first use on the left, peak memory by kind on the right. A PNG."""
    rows = [row for row in rows_of(lines) if row.median is not None]
    figure, (left, right) = _figure(rows_high=len(rows), columns=2)
    places = range(len(rows))
    _stacked(left, rows, ("load_s", "first_use_s"), ("load", "first use"), 1)
    spread = [
        [_of(row, "total_s") - row.total_range_s[0] for row in rows],
        [row.total_range_s[1] - _of(row, "total_s") for row in rows],
    ]
    totals = [_of(row, "total_s") for row in rows]
    left.errorbar(totals, places, xerr=spread, fmt="none", ecolor="black", elinewidth=1, capsize=2)
    floor = [_of(row, "total_s") for row in rows if row.label.startswith("floor")]
    if floor:
        left.axvline(max(floor), color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    left.set_yticks(places, [row.label for row in rows])
    left.set_xlabel("seconds (median, min to max; dashed: the floor)")
    keys = ("peak_anonymous_bytes", "peak_file_bytes")
    _stacked(right, rows, keys, ("anonymous", "file (mapped)"), MIB)
    right.set_yticks(places, [""] * len(rows))
    right.set_xlabel("peak memory over the start, MiB")
    for axis in (left, right):
        axis.invert_yaxis()
        axis.grid(axis="x", color="#dddddd", linewidth=0.6)
        axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0)
        axis.margins(x=0.03, y=0.02)
    return _png(figure)


def memory_over_time(lines: Sequence[dict[str, Any]]) -> bytes:
    """Resident memory over time, one curve per loader, from its median round. A PNG."""
    labels = [row.label for row in rows_of(lines) if row.median is not None]
    labels = [label for label in labels if label != "floor: read"]
    figure, (axis,) = _figure(rows_high=16 + len(labels) // 2, columns=1)
    for place, (label, style) in enumerate(_styles(labels)):
        ours = label.startswith("streamload")
        shade = str(round(0.55 * place / len(labels), 2))
        style |= {"color": OURS if ours else shade, "linewidth": 2 if ours else 1}
        style |= {"markersize": 4, "markevery": (0.03 * (1 + place % 3), 0.15)}
        trace = _median_trace(lines, label)
        axis.plot([point[0] for point in trace], [point[1] / MIB for point in trace], **style)
    axis.set_xlabel("seconds since the start of the load, first use included")
    axis.set_ylabel("resident memory over the start, MiB")
    axis.grid(color="#dddddd", linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return _png(figure)


def scale(series: dict[str, list[tuple[float, float, float]]], across: str) -> bytes:
    """Time and memory against size on logarithmic axes. A PNG.

    Args:
        series: label to (size, seconds, bytes) points.
        across: what the size is, with its unit.
    """
    figure, axes = _figure(rows_high=16, columns=2)
    for label, style in _styles(series):
        style["color"] = OURS if label.startswith("streamload") else "black"
        sizes, seconds, nbytes = zip(*series[label], strict=True)
        axes[0].loglog(sizes, seconds, **style)
        axes[1].loglog(sizes, [max(1, count) / MIB for count in nbytes], **style)
    for axis, what in zip(axes, ("seconds", "peak memory over the start, MiB"), strict=True):
        axis.set_xlabel(across)
        axis.set_ylabel(what)
        axis.grid(color="#dddddd", linewidth=0.6)
    axes[0].legend(frameon=False)
    return _png(figure)


def _styles(labels: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each label with a line and a marker that tell it from its neighbours without colour."""
    dashes, markers = itertools.cycle(["-", "--", "-.", ":"]), itertools.cycle("osv^D*PXhp<>")
    for label, dash, marker in zip(labels, dashes, markers, strict=False):
        yield label, {"label": label, "linestyle": dash, "marker": marker}


def _figure(*, rows_high: int, columns: int) -> tuple[Any, Any]:
    pyplot.switch_backend("Agg")
    size = (WIDTH_INCHES, 1.0 + 0.23 * rows_high)
    with pyplot.rc_context(STYLE):  # type: ignore[arg-type]
        figure, axes = pyplot.subplots(
            1, columns, figsize=size, layout="constrained", squeeze=False
        )
    return figure, list(axes[0])


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    pyplot.close(figure)
    return buffer.getvalue()


def _stacked(
    axis: Any, rows: list[Row], keys: tuple[str, str], labels: tuple[str, str], unit: float
) -> None:
    """Two parts on top of each other: full, then hatched on white."""
    places, edges = range(len(rows)), {"edgecolor": "black", "linewidth": 0.5, "height": 0.7}
    first, second = ([_of(row, key) / unit for row in rows] for key in keys)
    axis.barh(places, first, color=[_colour(row) for row in rows], **edges)
    axis.barh(places, second, left=first, color="white", hatch="////", **edges)
    # Entries of the legend of their own, as bars have several colours.
    axis.barh([0], [0], color=OTHERS, edgecolor="black", linewidth=0.5, label=labels[0])
    axis.barh([0], [0], color="white", edgecolor="black", hatch="////", label=labels[1])


def _colour(row: Row) -> str:
    if row.label.startswith("floor"):
        return LIGHT
    return OURS if row.label.startswith("streamload") else OTHERS


def _of(row: Row, key: str) -> float:
    return max(0.0, float((row.median or {}).get(key) or 0.0))


def _median_trace(lines: Sequence[dict[str, Any]], label: str) -> list[list[float]]:
    own = [line for line in lines if line.get("label") == label and line.get("ok")]
    middle = statistics.median_low(line["total_s"] for line in own)
    trace: list[list[float]] = next(line["trace"] for line in own if line["total_s"] == middle)
    return trace
