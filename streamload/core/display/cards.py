"""A record as a few lines of text, and as HTML for notebooks, from one description.

Names of tensors, files and models are anybody's: all text is escaped, for both. The HTML takes its
colours from where it stands, so that it reads on light and dark ground, and brings no script, no
style sheet and nothing from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import TypeAlias

from streamload.core.wording import printable, shortened

_INSIDE = re.compile("(?<![,:;]) ")  # a space that ends no part of a list
Rows: TypeAlias = Callable[[], Iterable[Sequence[str]]]

# A terminal's 80 columns; what a notebook shows in one cell of a table.
_COLUMNS, _CELL_CHARS = 80, 160
_MOST_PROBLEMS, _MOST_NOTICES, _LINES_EACH, _MOST_LINES = 4, 3, 2, 12
_MOST_ROWS, _MOST_CHARS = 400, 52_000


@dataclass(frozen=True, slots=True)
class Section:
    """A list that is long: its title with the count, its rows only where they are shown."""

    title: str
    count: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class Card:
    """What a record shows.

    Attributes:
        title: one line: what it is.
        facts: label and value, the most telling first.
        problems, notices: stand before all else.
        sections: lists, folded away in HTML and left out of text.
        picture: SVG, made here and not of anybody's text.
        hint: where the rest is, as attributes.
        body: lines of text in place of sections.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    picture: str = ""
    hint: str = ""
    body: tuple[str, ...] = ()


class Shown:
    """A record that shows itself by a card: it defines ``_card``."""

    __slots__ = ()

    def _card(self) -> Card:
        raise NotImplementedError

    def __repr__(self) -> str:
        return as_text(self._card())

    def _repr_html_(self) -> str:
        return as_html(self._card())


def as_text(card: Card) -> str:
    """At most twelve lines that fit a terminal of 80 columns."""
    lines = [card.title]
    lines += _first("problem", card.problems, _MOST_PROBLEMS)
    lines += _first("notice", card.notices, _MOST_NOTICES)
    for label, value in card.facts:
        # Cut in the middle, counts would be others; a number stays with its unit.
        text = _INSIDE.sub("\xa0", printable(f"{label}: {value}"))
        lines += [line.replace("\xa0", " ") for line in _wrapped(text)]
    lines += [f"  {line}" for line in card.body]
    end = [f"  {card.hint}"] if card.hint else []
    if len(lines) + len(end) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - len(end) - 1], "  …"]
    return "\n".join(shortened(printable(line), _COLUMNS) for line in [*lines, *end])


def _first(word: str, texts: Sequence[str], most: int) -> list[str]:
    """The first few, each on two lines at most."""
    lines: list[str] = []
    for text in texts[:most]:
        lines += _wrapped(printable(f"{word}: {text}"))
    left = len(texts) - most
    return [*lines, f"  … and {left} more {word}{'s' * (left > 1)}"] if left > 0 else lines


def _wrapped(text: str) -> list[str]:
    """On two lines at most, broken between words."""
    return wrap(
        text,
        _COLUMNS - 1,
        initial_indent="  ",
        subsequent_indent="    ",
        max_lines=_LINES_EACH,
        placeholder=" …",
    )


def as_html(card: Card) -> str:
    """A card; sections are folded, and end where the whole would be too much for a page."""
    parts = [f'<div style="font-weight:600">{_text(card.title)}</div>']
    parts += [
        _told(word, texts[:_MOST_ROWS], len(texts))
        for word, texts in (("problem", card.problems), ("notice", card.notices))
        if texts
    ]
    cells = "".join(
        f'<tr><td style="{_CELL};opacity:.7">{_text(label)}</td>'
        f'<td style="{_CELL}">{_text(value)}</td></tr>'
        for label, value in card.facts
    )
    parts += [f'<table style="{_TABLE}">{cells}</table>'] if cells else []
    parts += [card.picture] if card.picture else []
    room = _MOST_CHARS - sum(map(len, parts))
    for section in card.sections:
        if section.count:
            parts.append(_folded(section, room))
            room -= len(parts[-1])
    if card.hint:
        parts.append(f'<div style="opacity:.7">{_text(card.hint)}</div>')
    return f'<div style="{_CARD}">{"".join(parts)}</div>'


_CARD = (
    "max-width:60em;margin-bottom:.5em;line-height:1.4;font-variant-numeric:tabular-nums;"
    "overflow-x:auto"
)
_TABLE = "border-collapse:collapse;margin:.3em 0;background:none;color:inherit;font-size:inherit"
_CELL = (
    "text-align:left;vertical-align:top;white-space:pre-wrap;padding:.1em .8em .1em 0;border:0;"
    "background:none"
)
_TOLD = "border-left:3px solid {};padding-left:.6em;margin:.3em 0"
_MARKS = {"problem": "#d64545", "notice": "#c98a1b"}


def _text(text: str) -> str:
    return escape(shortened(printable(text), _CELL_CHARS))


def _told(word: str, texts: Sequence[str], count: int) -> str:
    """Problems or notices: the first few in sight, the others folded."""
    most = {"problem": _MOST_PROBLEMS, "notice": _MOST_NOTICES}[word]
    seen = "".join(f"<div>{word}: {_long(text)}</div>" for text in texts[:most])
    rest: list[str] = []
    room = _MOST_CHARS // 4
    for text in texts[most:]:
        row = f"<div>{_long(text)}</div>"
        room -= len(row)
        if room < 0:
            break
        rest.append(row)
    more = count - most
    if more > 0:
        left = more - len(rest)
        cut = f"<div>… and {left} more</div>" if left else ""
        summary = f"<summary>{more} more {word}{'s' * (more > 1)}</summary>"
        seen += f"<details>{summary}{''.join(rest)}{cut}</details>"
    return f'<div style="{_TOLD.format(_MARKS[word])}">{seen}</div>'


def _long(text: str) -> str:
    return escape(shortened(printable(text), 8 * _CELL_CHARS))


def _folded(section: Section, room: int) -> str:
    """A list behind its title, with as many rows as there is room for."""
    rows: list[str] = []
    is_cut = False
    for row in section.rows():
        cells = "".join(f'<td style="{_CELL}">{_text(cell)}</td>' for cell in row)
        text = f"<tr>{cells}</tr>"
        room -= len(text)
        if room < 0 or len(rows) == _MOST_ROWS:
            is_cut = True
            break
        rows.append(text)
    cut = "<div>… the rest is in the lists of the object itself</div>" if is_cut else ""
    table = f'<table style="{_TABLE}">{"".join(rows)}</table>'
    title = f"{_text(section.title)} ({section.count})"
    return f"<details><summary>{title}</summary>{table}{cut}</details>"
