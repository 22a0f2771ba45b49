"""Lists of tensor names with what repeats folded: ``h.0.ln`` … ``h.47.ln`` is one row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeAlias, TypeVar

Part: TypeAlias = "str | tuple[int, ...]"
D = TypeVar("D", bound=Hashable)

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True)
class Row(Generic[D]):
    """Names that differ in whole-segment numbers only and share ``detail``.

    Attributes:
        parts: the name's segments; a tuple holds the numbers that stand in its place.
        detail: what the names have in common.
        count: how many names the row stands for.
    """

    parts: tuple[Part, ...]
    detail: D
    count: int = 1

    @property
    def block(self) -> tuple[Part, ...]:
        """The segments up to the first number, it included; empty if nothing repeats."""
        for i, part in enumerate(self.parts):
            if isinstance(part, tuple):
                return self.parts[: i + 1]
        return ()

    def block_text(self) -> str:
        """``h.0…h.47`` and how many; parts before the number are repeated."""
        *before, numbers = self.block
        assert isinstance(numbers, tuple)
        stem = "".join(f"{part}." for part in before)
        spans = ", ".join("…".join(f"{stem}{n}" for n in span) for span in _spans(numbers))
        return f"{spans} {TIMES}{len(numbers)}"

    def name_text(self, skip: int = 0) -> str:
        """The name without its first ``skip`` segments, numbers as ``{0…7}``."""
        shown = (p if isinstance(p, str) else f"{{{indices_text(p)}}}" for p in self.parts[skip:])
        return ".".join(shown)


def fold(entries: Iterable[tuple[str, D]]) -> list[Row[D]]:
    """Fold (name, detail) pairs, keeping the order of first appearance.

    Numbers are folded from the last one to the first, so that experts fold within their layer
    and layers whose experts fold alike fold together.
    """
    rows = [Row(tuple(name.split(".")), detail) for name, detail in entries]
    # A shared prefix length keeps this a few passes over the list, whatever its length.
    longest = max((len(row.parts) for row in rows), default=0)
    for place in range(longest - 1, -1, -1):
        rows = list(_fold_at(place, rows))
    return _sorted_by_block(rows)


def by_block(
    rows: Iterable[Row[D]],
    heading: Callable[[Row[D]], tuple[str, ...]],
    cells: Callable[[D], tuple[str, ...]],
) -> Iterator[tuple[str, ...]]:
    """A table's rows: above those of a block its heading, and their names without the block's."""
    block: tuple[Part, ...] = ()
    for row in rows:
        if row.block and row.block != block:
            yield heading(row)
        block = row.block
        yield ("  " * bool(block) + row.name_text(len(block)), *cells(row.detail))


def _sorted_by_block(rows: list[Row[D]]) -> list[Row[D]]:
    """Rows of one block together, at the place of the block's first row."""
    groups: dict[object, list[Row[D]]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.block or i, []).append(row)
    return [row for group in groups.values() for row in group]


def indices_text(numbers: tuple[int, ...]) -> str:
    """``0…47`` or ``0…3, 7``."""
    return ", ".join("…".join(map(str, span)) for span in _spans(numbers))


def _fold_at(place: int, rows: list[Row[D]]) -> Iterator[Row[D]]:
    groups: dict[Hashable, list[Row[D]]] = {}
    for i, row in enumerate(rows):
        part = row.parts[place] if place < len(row.parts) else ""
        if isinstance(part, str) and part.isascii() and part.isdigit():
            key: Hashable = (row.parts[:place], row.parts[place + 1 :], row.detail, row.count)
        else:
            key = i
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        first = group[0]
        if len(group) == 1:
            yield first
            continue
        numbers = tuple(sorted(int(str(row.parts[place])) for row in group))
        parts = (*first.parts[:place], numbers, *first.parts[place + 1 :])
        yield Row(parts, first.detail, sum(row.count for row in group))


def _spans(numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Runs of consecutive numbers as (first, last), or (only,)."""
    # Within a run, a number is as far from its place in the list as the others.
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield (members[0],) if len(members) == 1 else (members[0], members[-1])
