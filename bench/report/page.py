"""One self-contained page: pictures, table, and how it was measured. Nothing is fetched."""

import base64
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from bench.report import plots, tables
from bench.report.frame import png
from bench.report.labels import shortened
from bench.report.looks import DARK, LIGHT, Look, narrow
from bench.report.rows import Row, rows_of, warnings_of
from streamload.core.wording import printable

PHONE_PX = 640
"""Narrower pages get the narrow pictures."""

_STYLE = """
:root { color-scheme: light dark; --muted: #595959; --line: #d0d4d9; --bad: #b00020; --page: #fff;
  --note: #b35900; --ours: #eaf2fb; }
@media (prefers-color-scheme: dark) { :root { --muted: #a3a9b1; --line: #30363d; --bad: #ff8a80;
  --page: #0d1117; --note: #f29113; --ours: #14233a; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 0 auto; padding: 1rem;
  background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; }
figure { margin: 1.5rem 0; }
img { display: block; width: 100%; height: auto; }
img.wide { max-width: 830px; } img.narrow { max-width: 370px; }
figcaption, .small { color: var(--muted); font-size: .85rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
.scroll:focus-visible { outline: 2px solid; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .8rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: left;
  white-space: nowrap; vertical-align: top; overflow-wrap: normal; }
thead th { white-space: normal; vertical-align: bottom; line-height: 1.2; }
tbody tr:last-child > * { border-bottom: 0; }
td.number, th.number { text-align: right; }
td.words { white-space: normal; min-width: 16rem; overflow-wrap: anywhere; }
tbody th, thead th:first-child { position: sticky; left: 0; background: var(--page);
  border-right: 1px solid var(--line); font-weight: 600; white-space: normal; min-width: 10.5rem;
  max-width: 20rem; overflow-wrap: anywhere; }
tr.ours > * { background: var(--ours); }
tr.bad td, tr.bad th { color: var(--bad); } tr.off td, tr.off th { color: var(--muted); }
.note { border-left: 4px solid var(--note); padding-left: .75rem; }
.only-narrow { display: none; }
@media (max-width: 640px) { body { padding: .75rem; } .only-narrow { display: block; }
  tbody th, thead th:first-child { min-width: 8.5rem; max-width: 11rem; } }
"""

_METHOD = (
    "Each measurement is a process of its own, the loaders take turns in rounds.",
    "The clock runs from the call until every element of every tensor has been read once, by the "
    "same function for all: a loader that only maps the file does its work in the second part. "
    "Imports are timed apart.",
    "Memory is read from outside, from /proc/PID/status every 5 ms, and the kernel's high-water "
    "mark fills in what falls in between. All of it is over what the process held before the load. "
    "Memory over time is that of the round whose time is the median (of two, the faster).",
    "GB/s is the bytes of the file that a model needs, by the whole time. The floor is the same "
    "number of threads reading the same bytes in blocks of 4 MiB, without and with a cast into "
    "fresh memory. x floor is a loader's whole time over that of the floor with the cast.",
    "After the clock has stopped the values are compared with the file: all of them up to "
    "256 MiB, samples of every tensor above that.",
)


def _text(text: str) -> str:
    """Text that is neither markup nor turns the direction of writing, whatever it holds."""
    return escape(printable(text))


def write(lines: Sequence[dict[str, Any]], path: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(render(lines))


def render(lines: Sequence[dict[str, Any]]) -> str:
    head = lines[0]
    title = shortened(f"Loading {tables.title(head)}", 90)
    notes = "".join(f'<p class="note">{_text(text)}</p>' for text in warnings_of(lines))
    method = "".join(f"<li>{_text(text)}</li>" for text in _METHOD)
    pictures = _picture(
        lines, plots.time_and_memory, "Time and peak memory of each loader"
    ) + _picture(lines, plots.memory_over_time, "Memory over time of each loader")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{_text(title)}</h1><p class="small">{_text(tables.setting(head))}</p>'
        f"{notes}{pictures}<h2>Figures</h2>{_table(lines)}"
        f"<h2>How it was measured</h2><ul>{method}</ul></body></html>\n"
    )


def _picture(
    lines: Sequence[dict[str, Any]],
    draw: Callable[[Sequence[dict[str, Any]], Look], Figure | None],
    words: str,
) -> str:
    """The picture for light and dark pages, wide and for a phone; the browser takes one of four."""
    sources, data = "", ""
    small, dark = f"(max-width: {PHONE_PX}px)", "(prefers-color-scheme: dark)"
    for look, media in (
        (narrow(DARK), f"{small} and {dark}"),
        (narrow(LIGHT), small),
        (DARK, dark),
        (LIGHT, None),
    ):
        figure = draw(lines, look)
        if figure is None:
            return ""
        data = f"data:image/png;base64,{base64.b64encode(png(figure)).decode('ascii')}"
        if media is not None:
            sources += f'<source media="{media}" srcset="{data}">'
    return (
        f'<figure><picture>{sources}<img class="wide" alt="{_text(words)}" src="{data}"></picture>'
        f"<figcaption>{_text(words)}</figcaption></figure>"
    )


def _table(lines: Sequence[dict[str, Any]]) -> str:
    """The loaders' names stay in sight where the figures have to be scrolled."""
    head = "".join(
        f'<th{_kind(place)} scope="col">{_text(name)}</th>'
        for place, name in enumerate(tables.COLUMNS)
    )
    body = "".join(map(_row, rows_of(lines)))
    return (
        '<p class="small only-narrow">The table is wider than this page: it scrolls sideways.</p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Figures of each loader">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(row: Row) -> str:
    name, *found = map(_text, tables.cells(row))
    cells = [f"<td{_kind(place)}>{cell}</td>" for place, cell in enumerate(found, start=1)]
    kind = "bad" if row.is_bad else "ours" if row.is_ours else "off" if not row.applies else "peer"
    if row.median is None:  # words take the room of the figures
        words = f'<td class="words" colspan="{len(cells) - 1}">{_text(tables.why_not(row))}</td>'
        cells = [words, cells[-1]]
    return f'<tr class="{kind}"><th scope="row">{name}</th>{"".join(cells)}</tr>'


def _kind(place: int) -> str:
    return ' class="number"' if place in tables.NUMERIC else ""
