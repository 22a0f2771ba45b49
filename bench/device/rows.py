"""What a check finds, and how much a run does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from bench.device.machine import Machine


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        what: was looked at.
        found: a figure or a few words.
        must: what it has to be; ``""`` if it is only told.
        ok: whether it is so; None where nothing is asked.
    """

    what: str
    found: str
    must: str = ""
    ok: bool | None = None


@dataclass(frozen=True)
class Sizes:
    """How much is done; the defaults are for a real device.

    Attributes:
        folder: where files are made.
        file_bytes: of the file that rates are measured with.
        part_bytes: of the tensors that are loaded again and again.
        small: tensors of 4 KiB.
        experts: tensors of 3 MiB.
        turns: how often what must never happen is tried.
        loads: one after the other, when leaks are looked for.
        workers: that rates are measured with.
    """

    folder: str
    file_bytes: int = 4 << 30
    part_bytes: int = 4 << 20
    small: int = 100_000
    experts: int = 1000
    turns: int = 200
    loads: int = 20
    workers: tuple[int, ...] = (1, 2, 4, 8, 16)


Rows: TypeAlias = Iterator[Row]


@dataclass(frozen=True)
class Check:
    """A part of the run.

    Attributes:
        name: of it.
        limit_s: after which it is ended.
        run: finds rows; what it raises is a finding, too.
    """

    name: str
    limit_s: float
    run: Callable[[Machine, Sizes], Rows] = field(repr=False)


def passed(what: str, is_so: bool, found: str = "") -> Row:
    """A row for what must be so."""
    return Row(what, found or ("yes" if is_so else "no"), "yes", is_so)


def gb_per_s(nbytes: float, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s"
