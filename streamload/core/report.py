"""What a plan found and a load did: frozen records, as JSON and as text."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

from streamload.core.display.cards import Card, Shown
from streamload.core.display.reports import export_card, load_card
from streamload.core.specs import Shape
from streamload.core.wording import format_bytes, joined, plural, printable, section

_SHOWN = 12


def as_json(record: Any) -> dict[str, Any]:
    """A record's fields as JSON has them: tuples are lists, records objects."""
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not is_dataclass(value):
        return value
    return value.to_dict() if hasattr(value, "to_dict") else as_json(value)


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """One assignment: which stored tensors fill which local one, and how."""

    sources: tuple[str, ...]
    name: str
    stored_dtype: str
    dtype: str
    shape: Shape
    transform: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; ``transform`` is null where the bytes are taken as they are."""
        return {**as_json(self), "transform": self.transform or None}


@dataclass(frozen=True, slots=True)
class ShapeMismatch:
    """A stored tensor whose shape does not fit its place."""

    source: str
    stored_shape: Shape
    name: str
    shape: Shape
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; without ``detail`` where there is none."""
        found = as_json(self)
        return found if self.detail else {k: v for k, v in found.items() if k != "detail"}

    def __str__(self) -> str:
        text = (
            f"{self.source!r} has shape {list(self.stored_shape)}, "
            f"{self.name!r} needs {list(self.shape)}"
        )
        return f"{text} ({self.detail})" if self.detail else text


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What a load needs and used, in bytes. Peaks are over the start of the call.

    Of a mapped model that does not fit, about ``resident_blocks`` of its ``blocks`` stay in memory,
    and each pass through it reads ``streamed_bytes``; all are 0 where nothing is read again.
    """

    needed_bytes: int = 0
    available_bytes: int = 0
    limit: str = "machine"
    peak_rss_bytes: int = 0
    peak_anonymous_bytes: int = 0
    peak_file_bytes: int = 0
    peak_device_bytes: int = 0
    staging_bytes: int = 0
    blocks: int = 0
    resident_blocks: int = 0
    streamed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one of several ranks read and took, in bytes; ``host`` is where."""

    rank: int
    host: str
    bytes_read: int
    bytes_unwanted: int
    bytes_held: int
    peak_rss_bytes: int
    peak_anonymous_bytes: int
    elapsed_s: float

    def __str__(self) -> str:
        between = f" ({format_bytes(self.bytes_unwanted)} of it between its own)"
        return (
            f"rank {self.rank}: read {format_bytes(self.bytes_read)}"
            f"{between if self.bytes_unwanted else ''}, holds {format_bytes(self.bytes_held)}, "
            f"peak {format_bytes(self.peak_rss_bytes)}, {self.elapsed_s:.2f} s"
        )


class MemorySample(NamedTuple):
    """The process's memory at one moment of a load, in bytes over its start."""

    elapsed_s: float
    rss_bytes: int
    anonymous_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport(Shown):
    """What was loaded, what was not and why, how fast and in how much memory.

    Attributes:
        loaded: every assignment, in the file's order.
        missing: module names that nothing in the file fills.
        unexpected: stored names that have no place in the module.
        shape_mismatch: stored tensors that do not fit.
        unfilled: module names still without values (on meta) after the load.
        ignored: stored names the table knows and skips (masks, rotary tables).
        tied: groups of module names that are one tensor.
        problems: everything that refuses the plan, one line each; empty if it holds.
        notices: what a user should know though it stops nothing.
        bytes_read, bytes_written: of tensor data; bytes_unwanted: of those read, those that were
            read only since they lie in short gaps between others, or between tensors;
            bytes_mapped: of tensors that are views of the file, read when they are used;
            elapsed_s from the call to the commit.
        ranks: what each rank did, where several loaded together; all else is of this one.
        missing_are: what became of what is missing, in words; ``""`` if nothing is, or if that
            refuses the load.
        trace: memory over time, a few hundred samples at most; not part of ``to_dict``.
    """

    source: str = ""
    model_type: str | None = None
    mode: str = "stream"
    layout: str = "contiguous"
    dtype: str | None = None
    device: str = "cpu"
    loaded: tuple[LoadedTensor, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shape_mismatch: tuple[ShapeMismatch, ...] = ()
    unfilled: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    problems: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_mapped: int = 0
    bytes_unwanted: int = 0
    elapsed_s: float = 0.0
    memory: MemoryReport = field(default_factory=MemoryReport)
    ranks: tuple[RankReport, ...] = ()
    missing_are: str = ""
    trace: tuple[MemorySample, ...] = field(default=(), compare=False)

    def _card(self) -> Card:
        return load_card(self)

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def bytes_per_s(self) -> float:
        return self.bytes_read / self.elapsed_s if self.elapsed_s else 0.0

    def summary(self) -> str:
        """One line: ``loaded=148 missing=0 unexpected=0 shape_mismatch=0``.

        With `` unfilled=12`` at its end where that many are still on meta.
        """
        unfilled = f" unfilled={len(self.unfilled)}" if self.unfilled else ""
        return (
            f"loaded={len(self.loaded)} missing={len(self.missing)} "
            f"unexpected={len(self.unexpected)} shape_mismatch={len(self.shape_mismatch)}{unfilled}"
        )

    def to_dict(self) -> dict[str, Any]:
        found = {"ok": self.ok, **as_json(replace(self, trace=()))}
        del found["trace"]
        found["source"] = printable(self.source)
        memory = found.pop("memory")
        return {**found, "bytes_per_s": self.bytes_per_s, "memory": memory}

    def to_text(self, *, verbose: bool = False) -> str:
        """A few readable lines; with ``verbose`` also the ledger of assignments."""
        lines = [self.summary()]
        if verbose:
            lines += [_ledger_line(entry) for entry in self.loaded]
        lines += self.finding_lines(_SHOWN)
        if self.elapsed_s:
            lines.append(
                f"{self.moved()}; "
                f"peak over the start: {format_bytes(self.memory.peak_rss_bytes)} resident, "
                f"{format_bytes(self.memory.peak_anonymous_bytes)} anonymous"
            )
        lines += self._rank_lines()
        return "\n".join(map(printable, lines))

    def finding_lines(self, most: int | None = None) -> list[str]:
        """What does not fit, the first ``most`` of each kind; what is ignored, tied, noticed."""
        lines = []
        for kind in ("missing", "unexpected", "shape_mismatch", "unfilled"):
            rows = [printable(str(row)) for row in getattr(self, kind)]
            fate = self.missing_are if kind == "missing" else ""
            lines += section(kind.replace("_", " "), rows, most, fate=fate)
        if self.ignored:
            lines.append(f"ignored: {len(self.ignored)} stored tensors the model does not load")
        lines += [f"tied: {' = '.join(group)}" for group in self.tied]
        lines += [f"notice: {notice}" for notice in self.notices]
        return list(map(printable, lines))

    def _rank_lines(self) -> list[str]:
        """What each rank did, and all of them."""
        if not self.ranks:
            return []
        read = sum(rank.bytes_read for rank in self.ranks)
        held = sum(rank.bytes_held for rank in self.ranks)
        total = f"{plural(len(self.ranks), 'rank')}: read {format_bytes(read)}"
        return [*map(str, self.ranks), f"{total}, hold {format_bytes(held)}"]

    def moved(self) -> str:
        """Which bytes went where, and how fast."""
        mapped = f"mapped {format_bytes(self.bytes_mapped)}"
        if self.bytes_mapped and not self.bytes_read:
            return f"{mapped} in {self.elapsed_s:.2f} s"
        read = (
            f"read {format_bytes(self.bytes_read)} in {self.elapsed_s:.2f} s "
            f"({format_bytes(int(self.bytes_per_s))}/s), wrote {format_bytes(self.bytes_written)}"
        )
        return f"{mapped}, {read}" if self.bytes_mapped else read


def _ledger_line(entry: LoadedTensor) -> str:
    how = f" [{entry.transform}]" if entry.transform else ""
    cast = (
        entry.dtype if entry.dtype == entry.stored_dtype else f"{entry.stored_dtype}→{entry.dtype}"
    )
    return f"{joined(entry.sources)} → {entry.name} {list(entry.shape)} {cast}{how}"


@dataclass(frozen=True, slots=True, repr=False)
class ExportReport(Shown):
    """What an export or a conversion wrote."""

    path: str
    files: tuple[str, ...] = ()
    written: tuple[LoadedTensor, ...] = ()
    dtype: str | None = None
    names: str = "published"
    notices: tuple[str, ...] = ()
    bytes_read: int = 0
    bytes_written: int = 0
    elapsed_s: float = 0.0
    memory: MemoryReport = field(default_factory=MemoryReport)

    def _card(self) -> Card:
        return export_card(self)

    def summary(self) -> str:
        return (
            f"wrote {plural(len(self.written), 'tensor')}, {format_bytes(self.bytes_written)} in "
            f"{plural(len(self.files), 'file')}, {self.elapsed_s:.2f} s"
        )

    def to_dict(self) -> dict[str, Any]:
        return {"ok": True, **as_json(self), "path": printable(self.path)}

    def to_text(self) -> str:
        lines = [self.summary(), *(f"notice: {n}" for n in self.notices)]
        return "\n".join(map(printable, lines))
