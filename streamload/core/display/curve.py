"""Memory over time as a small picture: SVG that takes its colours from the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamload.core.wording import format_bytes

if TYPE_CHECKING:
    from streamload.core.report import MemorySample

_WIDTH, _HEIGHT = 480, 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 4, 116, 14, 18
_LINES = (
    ("file", "file_bytes", "1 3", 1.4),
    ("anonymous", "anonymous_bytes", "5 3", 1.4),
    ("resident", "rss_bytes", "", 2.0),
)


def memory_curve(
    samples: Sequence[MemorySample], peak_bytes: int = 0, target_bytes: int = 0
) -> str:
    """Resident, anonymous and file-backed memory over the start; ``""`` without a trace.

    Args:
        samples: in order of time.
        peak_bytes: the most resident memory, which may fall between two samples.
        target_bytes: what the load wrote, drawn as a level to compare with.
    """
    if len(samples) < 3:
        return ""
    longest = samples[-1].elapsed_s or 1.0
    highest = max(target_bytes, *(max(sample[1:]) for sample in samples), 1)
    across = (_WIDTH - _LEFT - _RIGHT) / longest
    up = (_HEIGHT - _TOP - _BOTTOM) / highest
    floor = _HEIGHT - _BOTTOM

    def height(nbytes: float) -> float:
        return floor - max(nbytes, 0) * up

    shapes = [_line(_LEFT, floor, _WIDTH - _RIGHT, floor, 0.4)]
    if target_bytes:
        level = height(target_bytes)
        shapes.append(_line(_LEFT, level, _WIDTH - _RIGHT, level, 0.35))
    labels: list[tuple[float, str]] = []
    for name, field, dashes, width in _LINES:
        curve = [(s.elapsed_s, float(getattr(s, field))) for s in samples]
        if max(nbytes for _, nbytes in curve) < highest / 200:
            continue
        points = " ".join(f"{_LEFT + at * across:.1f},{height(n):.1f}" for at, n in curve)
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        shapes.append(
            f'<polyline points="{points}" fill="none" stroke="#3987c9" stroke-width="{width}"'
            f'{dash} stroke-linejoin="round"/>'
        )
        labels.append((height(curve[-1][1]), name))
    shapes += [_label(y, text) for y, text in _apart(labels)]
    peak = max(peak_bytes, *(sample.rss_bytes for sample in samples))
    shapes.append(_text(_LEFT, _TOP - 4, f"peak {format_bytes(peak)} over the start"))
    shapes.append(_text(_LEFT, _HEIGHT - 5, "0 s"))
    shapes.append(_text(_WIDTH - _RIGHT, _HEIGHT - 5, f"{longest:.2f} s", "end"))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'style="width:100%;max-width:{_WIDTH}px;display:block" font-family="inherit" '
        f'font-size="11" fill="currentColor"><title>memory over time</title>{"".join(shapes)}</svg>'
    )


def _apart(labels: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Labels at the heights of their lines, moved down so that none covers another."""
    placed: list[tuple[float, str]] = []
    room = _HEIGHT - _BOTTOM - 12 * len(labels)
    for y, text in sorted(labels):
        highest = placed[-1][0] + 12 if placed else _TOP
        placed.append((max(min(y, room + 12 * (len(placed) + 1)), highest), text))
    return placed


def _line(x1: float, y1: float, x2: float, y2: float, opacity: float) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="currentColor" opacity="{opacity}"/>'


def _label(y: float, text: str) -> str:
    return _text(_WIDTH - _RIGHT + 6, y + 4, text)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
