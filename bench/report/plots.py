"""Pictures of the figures, told apart without colour, too."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from bench.report.frame import framed, names, save, settings
from bench.report.labels import spread
from bench.report.looks import LIGHT, Look
from bench.report.rows import Row, measured_rows

MIB, GIB = 1 << 20, 1 << 30


def save_all(lines: Sequence[dict[str, Any]], stem: str, look: Look = LIGHT) -> list[str]:
    """Writes ``STEM-time-memory.png`` and ``STEM-over-time.png``; returns their paths.

    What there are no figures for is not drawn.
    """
    drawn = (("time-memory", time_and_memory), ("over-time", memory_over_time))
    return save(((what, draw(lines, look)) for what, draw in drawn), stem, look)


def time_and_memory(lines: Sequence[dict[str, Any]], look: Look = LIGHT) -> Figure | None:
    """Bars: load and first use on the left, peak memory by kind on the right."""
    rows = measured_rows(lines)
    if not rows:
        return None
    unit, unit_name = _unit(_of(row, "peak_rss_bytes") for row in rows)
    with settings(look):
        figure, axes = framed(lines[0], "time and peak memory", look, lines=len(rows), columns=2)
        left, right = axes
        _stacked(left, rows, ("load_s", "first_use_s"), ("load", "first use"), 1, look)
        keys = ("peak_anonymous_bytes", "peak_file_bytes")
        _stacked(right, rows, keys, ("anonymous", "file (mapped)"), unit, look)
        floor = [_of(row, "total_s") / row.times_floor for row in rows if row.times_floor]
        if floor:
            left.axvline(floor[0], color=look.ink, linewidth=0.8, linestyle=(0, (4, 3)))
        _spans(left, [row for row in rows if row.rounds > 1], rows, look)
        left.set_xlabel("seconds (x: times the floor, dashed)" if floor else "seconds")
        right.set_xlabel(f"peak memory over the start, {unit_name}")
        labels = names(figure, (row.label for row in rows), look)
        for axis in axes:
            shown = labels if axis is left or look.is_narrow else [""] * len(rows)
            axis.set_yticks(range(len(rows)), shown)
            axis.tick_params(axis="y", length=0)
            axis.set_ylim(len(rows) - 0.4, -0.6)
            axis.locator_params(axis="x", nbins=6)
            axis.grid(axis="x", color=look.grid, linewidth=0.6)
            axis.legend(
                frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0,
                labelcolor=look.ink, fontsize=look.font_points - 1, handlelength=1.5,
                columnspacing=1.2, borderaxespad=0.3,
            )  # fmt: skip
        peaks = [_of(row, "peak_rss_bytes") / unit for row in rows]
        _values(figure, left, [max(_of(r, "total_s"), r.total_range_s[1]) for r in rows],
                [_time(row) for row in rows], look)  # fmt: skip
        _values(figure, right, peaks, [_short(peak) for peak in peaks], look)
    return figure


def memory_over_time(lines: Sequence[dict[str, Any]], look: Look = LIGHT) -> Figure | None:
    """Resident memory over time, one curve per loader, from its median round; ours on top.

    None if no loader's memory was watched while it loaded.
    """
    rows = [row for row in measured_rows(lines) if row.label != "floor: read"]
    traces = [(row, trace) for row in rows if (trace := _median_trace(lines, row.label))]
    if not traces:
        return None
    unit, unit_name = _unit(point[1] for _, trace in traces for point in trace)
    curves = []
    with settings(look):
        high = max(15, 4 + len(traces)) if look.is_narrow else max(15, 2 + 0.9 * len(traces))
        figure, (axis,) = framed(lines[0], "memory while it loads", look, lines=high)
        labels = names(figure, (row.label for row, _ in traces), look)
        styles = _styles([row for row, _ in traces], look)
        for (row, trace), words, style in zip(traces, labels, styles, strict=True):
            seconds, sizes = [point[0] for point in trace], [point[1] / unit for point in trace]
            axis.plot(seconds, sizes, **style)
            dot = {key: style[key] for key in ("color", "zorder")}
            axis.plot(seconds[-1:], sizes[-1:], marker="o", markersize=4, **dot)
            if not look.is_narrow:
                peak = _short(_of(row, "peak_rss_bytes") / unit)
                words += f"   {_seconds(_of(row, 'total_s'))}, peak {peak} {unit_name}"
            curves.append(_Curve(words, seconds[-1], sizes[-1], row.is_ours, style))
        axis.set_xlabel("seconds, first use included")
        axis.set_ylabel(f"memory over the start, {unit_name}")
        axis.grid(color=look.grid, linewidth=0.6)
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, max(curve.ended_s for curve in curves) * 1.02)
        _label_ends(figure, axis, curves, look)
    return figure


def scale(
    head: dict[str, Any],
    series: dict[str, list[tuple[float, float, float]]],
    across: str,
    look: Look = LIGHT,
) -> Figure:
    """Time and memory against size on logarithmic axes.

    Args:
        head: the run's first line.
        series: label to (size, seconds, bytes) points.
        across: what the size is, with its unit.
        look: colours and sizes.
    """
    rows = [Row(label, "", None) for label in series]
    with settings(look):
        figure, axes = framed(head, f"growth with {across}", look, lines=14, columns=2)
        labels = names(figure, series, look)
        for row, label, style in zip(rows, labels, _styles(rows, look), strict=True):
            sizes, seconds, nbytes = zip(*series[row.label], strict=True)
            style |= {"marker": "o", "markersize": 3.5, "label": label}
            axes[0].loglog(sizes, seconds, **style)
            axes[1].loglog(sizes, [max(1, count) / MIB for count in nbytes], **style)
        for axis, what in zip(axes, ("seconds", "peak memory over the start, MiB"), strict=True):
            axis.set_xlabel(across)
            axis.set_ylabel(what)
            axis.grid(color=look.grid, linewidth=0.6)
            for side in (axis.xaxis, axis.yaxis):
                side.set_major_locator(LogLocator(subs=(1, 3)))
                side.set_major_formatter(lambda value, _: _plain(value))
                side.set_minor_formatter(NullFormatter())
        if rows:
            axes[0].legend(frameon=False, labelcolor=look.ink)
    return figure


@dataclass(frozen=True)
class _Curve:
    """A drawn curve's end, in the axes' units, and what is written beside it."""

    words: str
    ended_s: float
    size: float
    is_ours: bool
    style: dict[str, Any]


def _label_ends(figure: Figure, axis: Any, curves: Sequence[_Curve], look: Look) -> None:
    """Names in a column right of the axes, each tied to where its curve ends."""
    texts = [
        axis.text(
            1.065, 0.5, curve.words, transform=axis.transAxes, va="center",
            size=look.font_points - 1, color=look.ours if curve.is_ours else look.ink,
            weight="bold" if curve.is_ours else "normal",
        )
        for curve in curves
    ]  # fmt: skip
    figure.draw_without_rendering()  # makes room for the words, and settles how high the axes are
    box = axis.get_window_extent()
    gap = max(text.get_window_extent().height for text in texts) * 1.1 / box.height
    places = [axis.transLimits.transform((0, curve.size))[1] for curve in curves]
    last_s = axis.get_xlim()[1]
    for text, curve, at, place in zip(
        texts, curves, places, spread(places, gap, gap / 2, 1 - gap / 2), strict=True
    ):
        text.set_y(place)
        line = {"color": curve.style["color"], "clip_on": False, "solid_capstyle": "butt"}
        axis.plot([curve.ended_s, last_s], [curve.size] * 2, linewidth=0.5, alpha=0.5, **line)
        line |= {key: curve.style[key] for key in ("linestyle", "linewidth")}
        axis.plot([1, 1.025, 1.055], [at, place, place], transform=axis.transAxes, **line)


def _styles(rows: Sequence[Row], look: Look) -> Iterator[dict[str, Any]]:
    """Each row's line: ours thick and on top, the floor dotted, the others in hues of their own.

    Where hues or ours come round again, they are dashed otherwise.
    """
    dashes = ["-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 1.5)), (0, (8, 3))]
    ours = itertools.cycle(dashes)
    others = itertools.cycle(itertools.product(dashes, look.peers))
    for row in rows:
        if row.is_ours:
            yield {"color": look.ours, "linestyle": next(ours), "linewidth": 2.4, "zorder": 4}
        elif row.is_floor:
            yield {"color": look.ink, "linestyle": (0, (1, 1)), "linewidth": 1.4, "zorder": 3}
        else:
            dash, hue = next(others)
            yield {"color": hue, "linestyle": dash, "linewidth": 1.4, "zorder": 2.5}


def _stacked(
    axis: Any, rows: list[Row], keys: tuple[str, str], labels: tuple[str, str], unit: float,
    look: Look,
) -> None:  # fmt: skip
    """Two parts on top of each other: full, then hatched on the page's colour."""
    places = range(len(rows))
    edges = {"edgecolor": look.ink, "linewidth": 0.5, "height": 0.7}
    first, second = ([_of(row, key) / unit for row in rows] for key in keys)
    axis.barh(places, first, color=[_colour(row, look) for row in rows], **edges)
    axis.barh(places, second, left=first, color=look.paper, hatch="////", **edges)
    # Entries of the legend of their own, as bars have several colours.
    axis.barh([0], [0], color=look.bar, label=labels[0], **edges)
    axis.barh([0], [0], color=look.paper, hatch="////", label=labels[1], **edges)


def _spans(axis: Any, spread_rows: list[Row], rows: list[Row], look: Look) -> None:
    """From the fastest round to the slowest."""
    for row in spread_rows:
        low, high = row.total_range_s
        total_s, place = _of(row, "total_s"), rows.index(row)
        axis.errorbar(
            [total_s], [place], xerr=[[total_s - low], [high - total_s]], fmt="none",
            ecolor=look.ink, elinewidth=1, capsize=2,
        )  # fmt: skip


def _values(
    figure: Figure, axis: Any, ends: Sequence[float], words: Sequence[str], look: Look
) -> None:
    """Figures right of the bars, and an axis long enough for them."""
    paper = {"facecolor": look.paper, "edgecolor": "none", "pad": 0.8}
    texts = [
        axis.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center",
                      color=look.ink, size=look.font_points - 1, bbox=paper, zorder=5)
        for place, (end, text) in enumerate(zip(ends, words, strict=True))
    ]  # fmt: skip
    axis.set_xlim(0, max(ends) or 1)
    for text in texts:  # they do not take part in the layout, or it would leave nothing for bars
        text.set_in_layout(False)
    figure.draw_without_rendering()
    width, pad = axis.get_window_extent().width, 8 * figure.dpi / 72
    taken = [min(0.7 * width, text.get_window_extent().width + pad) for text in texts]
    axis.set_xlim(0, max(e * width / (width - t) for e, t in zip(ends, taken, strict=True)) or 1)


def _unit(sizes: Iterable[float]) -> tuple[float, str]:
    return (GIB, "GiB") if max(sizes, default=0) >= 4 * GIB else (MIB, "MiB")


def _time(row: Row) -> str:
    times = "" if row.times_floor is None else f"  {row.times_floor:.2f}x"
    return _seconds(_of(row, "total_s")) + times


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.2g} ms"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _plain(value: float) -> str:
    """A number on a logarithmic axis: ``0.3``, ``100``, ``30k``, ``1G``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _colour(row: Row, look: Look) -> str:
    if row.is_floor:
        return look.pale
    return look.ours if row.is_ours else look.bar


def _of(row: Row, key: str) -> float:
    return max(0.0, float((row.median or {}).get(key) or 0.0))


def _median_trace(lines: Sequence[dict[str, Any]], label: str) -> list[list[float]]:
    """Of the median one of the rounds that have one; empty if none has."""
    own = [x for x in lines if x.get("label") == label and x.get("ok") and x.get("trace")]
    if not own:
        return []
    middle = statistics.median_low(line["total_s"] for line in own)
    trace: list[list[float]] = next(line["trace"] for line in own if line["total_s"] == middle)
    return trace
