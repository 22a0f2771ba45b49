"""One self-contained page: pictures, table, and how it was measured. Nothing is fetched."""

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

from bench.report import plots, tables
from bench.report.rows import rows_of, warnings_of
from streamload.core.wording import printable

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 1.5rem 0; }
img { width: 100%; max-width: 830px; height: auto; background: white; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #8886; text-align: left; }
td.number, th.number { text-align: right; white-space: nowrap; }
.note { border-left: 4px solid #c60; padding-left: .75rem; }
tr.bad td { color: #b00020; }
@media (prefers-color-scheme: dark) { tr.bad td { color: #ff8a80; } }
"""

_METHOD = (
    "Each measurement is a process of its own, the loaders take turns in rounds.",
    "The clock runs from the call until every element of every tensor has been read once, by the "
    "same function for all: a loader that only maps the file does its work in the second part. "
    "Imports are timed apart.",
    "Memory is read from outside, from /proc/PID/status every 5 ms, and the kernel's high-water "
    "mark fills in what falls in between. All of it is over what the process held before the load.",
    "GB/s is the bytes of the file that a model needs, by the whole time. The floor is the same "
    "number of threads reading the same bytes in blocks of 4 MiB, without and with a cast into "
    "fresh memory.",
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
    title = f"Loading {head['path']} to {head['dtype'] or 'its stored dtype'}"
    notes = "".join(f'<p class="note">{_text(text)}</p>' for text in warnings_of(lines))
    method = "".join(f"<li>{_text(text)}</li>" for text in _METHOD)
    pictures = ""
    if any(row.median for row in rows_of(lines)):
        pictures = _picture(
            plots.time_and_memory(lines), "Time and peak memory of each loader"
        ) + _picture(plots.memory_over_time(lines), "Memory over time of each loader")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{_text(title)}</h1><p>{_text(tables.setting(head))}</p>{notes}{pictures}"
        f'<div class="wide">{_table(lines)}</div>'
        f"<h2>How it was measured</h2><ul>{method}</ul></body></html>\n"
    )


def _picture(png: bytes, words: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure><img alt="{_text(words)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(words)}</figcaption></figure>"
    )


def _table(lines: Sequence[dict[str, Any]]) -> str:
    head = "".join(
        f'<th{_kind(place)} scope="col">{_text(name)}</th>'
        for place, name in enumerate(tables.COLUMNS)
    )
    body = ""
    for row in rows_of(lines):
        bad = row.median is None or row.values not in ("right", "none kept")
        cells = "".join(
            f"<td{_kind(place)}>{_text(cell)}</td>" for place, cell in enumerate(tables.cells(row))
        )
        body += f"<tr{' class=bad' if bad else ''}>{cells}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _kind(place: int) -> str:
    return ' class="number"' if place in tables.NUMERIC else ""
