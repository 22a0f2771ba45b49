"""The cards of plans and reports."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from streamload.core.display.assignments import assignment_rows
from streamload.core.display.cards import Card, Section
from streamload.core.display.curve import memory_curve
from streamload.core.display.folding import TIMES, fold
from streamload.core.wording import format_bytes, listed, plural, printable, without_secrets

if TYPE_CHECKING:
    from streamload.core.report import ExportReport, LoadedTensor, LoadReport, MemoryReport

_LISTS = ("missing", "unexpected", "shape_mismatch", "unfilled", "ignored")
_FOLDED = 20_000


class Findings(Protocol):
    """What a plan and the report of a load have in common."""

    @property
    def source(self) -> str: ...
    @property
    def model_type(self) -> str | None: ...
    @property
    def dtype(self) -> str | None: ...
    @property
    def tied(self) -> Sequence[Sequence[str]]: ...
    @property
    def problems(self) -> tuple[str, ...]: ...
    @property
    def notices(self) -> tuple[str, ...]: ...


def findings_card(
    kind: str,
    found: Findings,
    place: str,
    *,
    count: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    picture: str = "",
    hint: str,
) -> Card:
    """What came in or would, and what does not fit, which is said first.

    Args:
        kind: the class that is shown.
        found: the record itself, with its lists.
        place: to where, and how.
        count: of tensors, in words.
        facts: beside the count.
        sections: beside the lists.
        picture: see Card.
        hint: see Card.
    """
    refused = f" (refused: {plural(len(found.problems), 'problem')})" if found.problems else ""
    source = without_secrets(found.source)
    name = os.path.basename(source.rstrip("/")) or source or "?"
    model = f" ({found.model_type})" if found.model_type else ""
    counts = [count, plural(len(found.tied), "tie")] if found.tied else [count]
    lists = {name: getattr(found, name) for name in _LISTS}
    counts += [f"{len(rows)} {name.replace('_', ' ')}" for name, rows in lists.items() if rows]
    ties = [" = ".join(group) for group in found.tied]
    return Card(
        f"{kind}{refused}: {name}{model} to {found.dtype or 'mixed dtypes'} {place}",
        facts=(("tensors", ", ".join(counts)), *facts),
        problems=found.problems,
        notices=found.notices,
        sections=(
            *(names_section(name.replace("_", " "), rows) for name, rows in lists.items()),
            Section("tied", len(ties), lambda: ((tie,) for tie in ties)),
            *sections,
        ),
        picture=picture,
        hint=hint,
    )


def load_card(report: LoadReport, kind: str = "LoadReport") -> Card:
    """The card of a load that was carried out, or, as ``plan.report``, only planned."""
    is_done = report.elapsed_s > 0
    facts = [("data", report.moved())] if is_done else []
    if is_done or report.memory.available_bytes:
        facts.append(("memory", _peaks(report.memory) if is_done else needed(report.memory)))
    if report.ranks:
        facts.append(("ranks", f"{len(report.ranks)}; the figures are of this one"))
    sizes = [
        (name.removesuffix("_bytes").replace("_", " "), format_bytes(size))
        for name, size in asdict(report.memory).items()
        if name.endswith("_bytes") and size
    ]
    return findings_card(
        kind,
        report,
        f"on {report.device}, mode {report.mode}",
        count=f"{len(report.loaded)} {'loaded' if is_done else 'to load'}",
        facts=facts,
        sections=(
            tensors_section("assignments", len(report.loaded), lambda: report.loaded),
            Section("memory", len(sizes), lambda: sizes),
            Section("ranks", len(report.ranks), lambda: ((str(rank),) for rank in report.ranks)),
        ),
        picture=memory_curve(report.trace, report.memory.peak_rss_bytes, report.bytes_written),
        hint="more: .to_text(verbose=True), .to_dict(), .loaded, .notices, .memory",
    )


def needed(memory: MemoryReport) -> str:
    """What a load needs, and what there is."""
    available = f"{format_bytes(memory.available_bytes)} available ({memory.limit} limit)"
    return f"{format_bytes(memory.needed_bytes)} needed, {available}"


def _peaks(memory: MemoryReport) -> str:
    rss, anonymous = memory.peak_rss_bytes, memory.peak_anonymous_bytes
    text = f"peak {format_bytes(rss)} over the start, {format_bytes(anonymous)} of it anonymous"
    device = memory.peak_device_bytes
    return f"{text}; {format_bytes(device)} on the device" if device else text


def names_section(title: str, names: Sequence[object]) -> Section:
    """A list of names, those that differ in a block's number folded; of very many, the first."""

    def rows() -> Iterator[tuple[str, str]]:
        for row in fold((printable(str(name)), "") for name in islice(names, _FOLDED)):
            yield row.name_text(), f"{TIMES} {row.count}" if row.count > 1 else ""

    return Section(title, len(names), rows)


def tensors_section(
    title: str, count: int, entries: Callable[[], Iterable[LoadedTensor]]
) -> Section:
    """Assignments, folded; of very many, the first ones."""
    return Section(title, count, lambda: assignment_rows(islice(entries(), _FOLDED)))


def export_card(report: ExportReport) -> Card:
    """What was written, and where."""
    wrote = format_bytes(report.bytes_written)
    facts = (
        ("wrote", f"{plural(len(report.written), 'tensor')}, {wrote} in {report.elapsed_s:.2f} s"),
        ("dtype", dtype_counts(t.dtype for t in report.written)),
        ("names", report.names),
        ("memory", _peaks(report.memory)),
    )
    return Card(
        f"ExportReport: {report.path}, {plural(len(report.files), 'file')}",
        facts=facts,
        notices=report.notices,
        sections=(
            Section("files", len(report.files), lambda: ((name,) for name in report.files)),
            tensors_section("tensors", len(report.written), lambda: report.written),
        ),
        hint="more: .to_dict(), .files, .written",
    )


def dtype_counts(dtypes: Iterable[str]) -> str:
    """``bfloat16``, or ``float32 388, float16 2`` where they differ."""
    counts = Counter(dtypes)
    if len(counts) == 1:
        return str(*counts)
    return listed((f"{name} {count}" for name, count in counts.most_common()), 4)
