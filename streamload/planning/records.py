"""The records a plan is made of: frozen, picklable, free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from streamload.core.display.cards import Card, Shown
from streamload.core.display.reports import findings_card, needed, tensors_section
from streamload.core.dtypes import BY_NAME
from streamload.core.errors import PlanError
from streamload.core.findings import Finding, fold, in_words
from streamload.core.options import Settings
from streamload.core.quick_records import quickly_made
from streamload.core.report import LoadedTensor, LoadReport, MemoryReport, ShapeMismatch
from streamload.core.specs import Shape, StridedCopy, TensorSpec, numel, size_of, stored_bytes
from streamload.core.wording import format_bytes, printable
from streamload.ranks.shards import Shard


@quickly_made
@dataclass(frozen=True, slots=True)
class TargetSpec:
    """One tensor of a module.

    Attributes:
        names: all names it is reachable by, the module's first one first (ties share a spec).
        dtype: safetensors name; ``is_meta`` is True while it holds no data.
        kind: ``"parameter"`` or ``"buffer"``.
        persistent: False for buffers that are not part of the ``state_dict``.
        strides: of the memory it holds, in elements; None while on meta.
        is_settled: ``dtype`` is what values are cast to, also while it holds none.
        is_made_later: what nothing fills gets its values after the load, from who built it.
        wrapper: the class of a tensor that holds its values in other tensors.
        shard: what this rank holds of it, if that is not all; ``shape`` is the whole one's, and
            ``strides`` are of what it holds.
        uncut: why that cannot be told.
    """

    names: tuple[str, ...]
    shape: Shape
    dtype: str
    kind: str = "parameter"
    is_meta: bool = True
    persistent: bool = True
    device: str = "cpu"
    strides: Shape | None = None
    is_settled: bool = False
    is_made_later: bool = False
    wrapper: str = ""
    shard: Shard | None = None
    uncut: str = ""

    @property
    def traits(self) -> tuple[object, ...]:
        """All that decides how it is placed, but its names."""
        return (
            self.shape,
            self.dtype,
            self.kind,
            self.is_meta,
            self.device,
            self.strides,
            self.is_settled,
            self.shard,
        )


@dataclass(frozen=True)
class Targets(Mapping[str, TargetSpec]):
    """A module's tensors by every name."""

    specs: tuple[TargetSpec, ...]

    @cached_property
    def by_name(self) -> dict[str, TargetSpec]:
        return {name: spec for spec in self.specs for name in spec.names}

    def __getitem__(self, name: str) -> TargetSpec:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    @cached_property
    def any_meta(self) -> bool:
        """True if some parameter holds no data yet: the module is to be built, not overwritten."""
        return any(s.is_meta and s.kind == "parameter" for s in self.specs)


@quickly_made
@dataclass(frozen=True, slots=True)
class MappedView:
    """A target that is a view of one stored tensor's bytes; numbers in elements."""

    stored_name: str
    offset: int
    strides: Shape


@quickly_made
@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One target, where its values come from, and how it is laid out.

    Attributes:
        name: the module's first name; ``aliases`` are the others (ties).
        sources: keys of ``Plan.stored``.
        strides: of the target, in elements; dense.
        dtype, stored_dtype: safetensors names; several stored ones are joined by ``+``. Of what is
            decoded, ``stored_dtype`` is what it becomes where nobody asks for another one.
        copies: strided copies that cover the target; ``stored_name`` is a key of ``Plan.stored``.
        reduces: ``""``, ``"sum"`` or ``"mean"``; then every source covers the whole target.
        is_new: True for a new tensor that is committed, False for one overwritten in place.
        mapped: set if the target is a view of the mapped file and nothing is moved.
        shard: what part of the module's tensor this is, which other ranks hold the rest of;
            ``shape``, ``strides`` and ``copies`` are of the part.
        whole_shape: of the module's tensor, if it is a part.
    """

    name: str
    aliases: tuple[str, ...]
    sources: tuple[str, ...]
    shape: Shape
    strides: Shape
    dtype: str
    stored_dtype: str
    copies: tuple[StridedCopy, ...]
    transform: str = ""
    reduces: str = ""
    tolerance: float = 0.0
    layer: int | None = None
    device: str = "cpu"
    is_new: bool = True
    mapped: MappedView | None = None
    shard: Shard | None = None
    whole_shape: Shape = ()

    @property
    def nbytes(self) -> int:
        return size_of(self.dtype, self.shape)

    @property
    def is_moved(self) -> bool:
        """True if workers fill it: it is neither a view of the file nor computed."""
        return self.mapped is None and not self.reduces


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two stored tensors that must be equal, since the module ties their names."""

    kept: PlannedTensor
    other: PlannedTensor


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """What a load will do.

    Attributes:
        tensors: every target that gets values, in the file's order.
        comparisons: pairs compared before anything is written.
        options: what was asked for.
        stored: seen name (prefix taken off) → the stored tensor's spec.
        source: the checkpoint's path, for messages.
        model_type: as in ``config.json``, where the names were bound by its table.
        dtype: torch's name of the targets' one floating dtype; None where they differ.
        missing, unexpected, shape_mismatch, unfilled, ignored, tied: see LoadReport.
        findings: what refuses the plan and what its user should know.
        memory: what the load needs and what there is.
        quantized: names of the tensors that become int8 on their way.
        meaning: of the findings, those on what the values mean.
        missing_are: see LoadReport.
    """

    tensors: tuple[PlannedTensor, ...]
    comparisons: tuple[Comparison, ...]
    options: Settings
    stored: Mapping[str, TensorSpec] = field(default_factory=dict, repr=False)
    source: str = ""
    model_type: str | None = None
    dtype: str | None = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shape_mismatch: tuple[ShapeMismatch, ...] = ()
    unfilled: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    findings: tuple[Finding, ...] = ()
    memory: MemoryReport = field(default_factory=MemoryReport)
    quantized: frozenset[str] = frozenset()
    meaning: tuple[str, ...] = ()
    missing_are: str = ""

    def _card(self) -> Card:
        options, mapped = self.options, sum(t.nbytes for t in self.tensors if t.mapped is not None)
        device = options.device if isinstance(options.device, str) else "several devices"
        data = f"read {format_bytes(self.bytes_to_read)}, write {format_bytes(self.bytes_to_write)}"
        return findings_card(
            "Plan",
            self,
            f"on {device}, mode {options.mode}",
            count=f"{len(self.tensors)} to load",
            facts=(
                ("data", f"map {format_bytes(mapped)}, {data}" if mapped else data),
                ("memory", needed(self.memory)),
            ),
            sections=(tensors_section("assignments", len(self.tensors), self._entries),),
            hint="more: .ok, .problems, .report (all lists), .memory",
        )

    @property
    def ok(self) -> bool:
        return not any(finding.refuses for finding in self.findings)

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that refuses the plan, one line each."""
        return in_words(self.findings, refusing=True)

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know though it stops nothing, one line each."""
        return in_words(self.findings, refusing=False)

    @property
    def bytes_to_write(self) -> int:
        """Bytes of all targets that are streamed."""
        return sum(t.nbytes for t in self.tensors if t.mapped is None)

    @cached_property
    def bytes_to_read(self) -> int:
        """Stored bytes of what is streamed: of whole tensors, or of the parts that are wanted.

        What is read in truth is a little more where gaps are read through.
        """
        streamed = [t for t in self.tensors if t.mapped is None]
        wanted: dict[str, int] = {}
        for copy in (copy for t in streamed for copy in t.copies):
            wanted[copy.stored_name] = wanted.get(copy.stored_name, 0) + numel(copy.shape)
        whole = stored_bytes(self.stored[name] for name in wanted)
        if all(t.shard is None for t in streamed):
            return whole
        shares = []
        for name, count in wanted.items():
            spec = self.stored[name]
            of = numel(spec.shape)
            shares.append(stored_bytes((spec,)) * min(count, of) // max(of, 1))
        return sum(shares)

    @property
    def ledger(self) -> tuple[LoadedTensor, ...]:
        """One entry for each target, in the file's order."""
        return tuple(self._entries())

    def _entries(self) -> Iterator[LoadedTensor]:
        for t in self.tensors:
            yield LoadedTensor(
                tuple([self.stored[name].name for name in t.sources]),
                t.name,
                _stored_dtypes([self.stored[name] for name in t.sources]),
                "int8" if t.name in self.quantized else _torch_name(t.dtype),
                t.whole_shape or t.shape,
                t.transform,
            )

    @cached_property
    def report(self) -> LoadReport:
        """The plan as a report: all lists, nothing loaded yet."""
        options = self.options
        return LoadReport(
            source=self.source,
            model_type=self.model_type,
            mode=options.mode,
            layout="stored" if options.stored_order else "contiguous",
            dtype=self.dtype,
            device=options.device if isinstance(options.device, str) else "mixed",
            loaded=self.ledger,
            missing=self.missing,
            unexpected=self.unexpected,
            shape_mismatch=self.shape_mismatch,
            unfilled=self.unfilled,
            ignored=self.ignored,
            tied=self.tied,
            problems=self.problems,
            notices=self.notices,
            memory=self.memory,
            missing_are=self.missing_are,
        )

    def with_findings(self, *findings: Finding) -> Plan:
        """The plan, and what else was found."""
        return replace(self, findings=(*self.findings, *findings)) if findings else self

    def with_transient(self, nbytes: int) -> Plan:
        """The plan, which needs so many bytes more while it is carried out."""
        needed, staging = self.memory.needed_bytes, self.memory.staging_bytes
        memory = replace(self.memory, needed_bytes=needed + nbytes, staging_bytes=staging + nbytes)
        return replace(self, memory=memory)

    def refused(self, *reasons: str) -> Plan:
        """The plan, refused for these reasons as well, if there are any."""
        return self.with_findings(*(Finding(reason, refuses=True) for reason in reasons))

    def noticed(self, *texts: str) -> Plan:
        """The plan, with more that its user should know."""
        return self.with_findings(*map(Finding, texts))

    def raise_if_refused(self) -> None:
        """Raise PlanError with all problems in one line, unless the plan holds."""
        if self.ok:
            return
        lines = fold(self.findings)
        more = f"; … and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        text = f"{printable(self.source)}: {'; '.join(lines[:_SHOWN])}{more}"
        raise PlanError(text, report=self.report)


def _stored_dtypes(specs: Sequence[TensorSpec]) -> str:
    """What the files hold of them, by torch's names."""
    names = [s.dtype if s.encoding is None else s.encoding.stored_dtype for s in specs]
    return "+".join(map(_torch_name, dict.fromkeys(names)))


def _torch_name(name: str) -> str:
    found = BY_NAME.get(name)  # encodings may have names of their own
    return (found and found.torch_name) or name


_SHOWN = 6
