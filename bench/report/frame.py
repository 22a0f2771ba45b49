"""Empty pictures under a title, finished ones as files; matplotlib's own state stays as it is."""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.report import tables
from bench.report.labels import shortened, wrapped
from bench.report.looks import LIGHT, Look
from streamload.core.wording import printable

DPI = 200
"""Twice what a README shows, for dense screens."""
COLOURS = 96
"""Of a picture's palette: looks like all of them, at half the size."""
_LINE = 1.35 / 72
"""Inches a line of text takes for each point of its size."""


@contextlib.contextmanager
def settings(look: Look | None = None) -> Iterator[None]:
    """Names are not formulas, and hatches are thin."""
    chosen: dict[Any, Any] = {"text.parse_math": False, "hatch.linewidth": 0.7}
    if look is not None:
        chosen["font.size"] = look.font_points
    with matplotlib.rc_context(chosen):
        yield


def png(figure: Figure) -> bytes:
    """The picture, with a palette of its own colours."""
    from PIL import Image

    whole, small = io.BytesIO(), io.BytesIO()
    with settings():
        figure.savefig(whole, format="png", dpi=DPI, facecolor=figure.get_facecolor())
    with Image.open(whole) as image:
        image.convert("RGB").quantize(COLOURS).save(small, format="png", optimize=True)
    return small.getvalue()


def save(drawn: Iterable[tuple[str, Figure | None]], stem: str, look: Look) -> list[str]:
    """Writes ``STEM-NAME.png`` for each figure there is (on dark pages ``STEM-NAME-dark.png``)."""
    written = []
    for name, figure in drawn:
        if figure is None:
            continue
        path = f"{stem}-{name}{'' if look is LIGHT else '-' + look.scheme}.png"
        with open(path, "wb") as file:
            file.write(png(figure))
        written.append(path)
    return written


def names(figure: Figure, texts: Iterable[str], look: Look) -> list[str]:
    """Names that can be printed, none wider than a share of the picture."""
    share = 0.42 if look.is_narrow else 0.3
    fits = _fitting(figure, share * figure.bbox.width, size=look.font_points)
    return [_cut(printable(text), fits) for text in texts]


def framed(
    head: dict[str, Any], what: str, look: Look, *, lines: float, columns: int = 1
) -> tuple[Figure, list[Any]]:
    """A figure under its title, of ``lines`` lines of text, with its axes.

    The title is ``what`` of which model, and below it machine, rounds and day. Several axes are
    side by side or, in a narrow picture, one above the other.
    """
    figure = Figure(figsize=(look.width_inches, 1), facecolor=look.paper, layout="constrained")
    FigureCanvasAgg(figure)
    stacked = columns if look.is_narrow else 1
    top = _titled(figure, head, what, look)
    high = top + stacked * (0.9 + 0.235 * lines) * look.font_points / 9
    _set_height(figure, top, high)
    axes = [a for row in figure.subplots(stacked, columns // stacked, squeeze=False) for a in row]
    for axis in axes:
        axis.set_facecolor(look.paper)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(look.muted)
        axis.tick_params(colors=look.muted, labelcolor=look.ink, which="both")
        axis.xaxis.label.set_color(look.ink)
        axis.yaxis.label.set_color(look.ink)
    return figure, axes


def _titled(figure: Figure, head: dict[str, Any], what: str, look: Look) -> float:
    """Writes the title into a figure an inch high; returns the inches it takes."""
    (model,) = names(figure, [tables.title(head)], look)
    small = " · ".join(printable(words) for words in tables.circumstances(head))
    used = 0.3 * look.font_points * _LINE
    for text, at, size, weight, color in (
        (f"{model}: {what}", " ", look.font_points + 2, "bold", look.ink),
        (small, " · ", look.font_points - 1, "normal", look.muted),
    ):
        fits = _fitting(figure, figure.bbox.width - 0.2 * figure.dpi, size=size, weight=weight)
        lines = [_cut(line, fits) for line in wrapped(text, fits, at)]
        across, down = 0.1 / look.width_inches, used
        figure.text(across, down, "\n".join(lines), size=size, weight=weight, color=color, va="top")
        used += len(lines) * size * _LINE
    return used


def _fitting(figure: Figure, most_px: float, **font: Any) -> Callable[[str], bool]:
    """Whether a line of text in this font is at most so wide."""

    def fits(line: str) -> bool:
        text = figure.text(0, 0, line, **font)
        width = text.get_window_extent().width
        text.remove()
        return bool(width <= most_px)

    return fits


def _cut(line: str, fits: Callable[[str], bool]) -> str:
    while not fits(line) and len(line) > 8:
        line = shortened(line, len(line) * 9 // 10)
    return line


def _set_height(figure: Figure, top: float, high: float) -> None:
    """Makes the figure ``high`` inches high, with room for axes below ``top``."""
    figure.set_size_inches(figure.get_figwidth(), high)
    for text in figure.texts:
        across, down = text.get_position()
        text.set_position((across, 1 - down / high))
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, 0, 1, 1 - top / high))
