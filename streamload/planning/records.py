"""The records a plan is made of: frozen, picklable, free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import PlanError, printable
from streamload.core.options import Settings
from streamload.core.report import LoadReport, MemoryReport
from streamload.core.specs import Shape, StridedCopy, TensorSpec, numel
from streamload.planning.problems import fold

__all__ = [
    "Comparison",
    "MappedView",
    "Plan",
    "PlannedTensor",
    "TargetSpec",
    "Targets",
]


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """One tensor of a module.

    Attributes:
        names: all names it is reachable by, the module's first one first (ties share a spec).
        dtype: safetensors name; ``is_meta`` is True while it holds no data.
        kind: ``"parameter"`` or ``"buffer"``.
        persistent: False for buffers that are not part of the ``state_dict``.
        strides: of the memory it holds, in elements; None while on meta.
    """

    names: tuple[str, ...]
    shape: Shape
    dtype: str
    kind: str = "parameter"
    is_meta: bool = True
    persistent: bool = True
    device: str = "cpu"
    strides: Shape | None = None


@dataclass(frozen=True)
class Targets(Mapping[str, TargetSpec]):
    """A module's tensors by every name."""

    specs: tuple[TargetSpec, ...]

    @cached_property
    def _by_name(self) -> dict[str, TargetSpec]:
        return {name: spec for spec in self.specs for name in spec.names}

    def __getitem__(self, name: str) -> TargetSpec:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @cached_property
    def any_meta(self) -> bool:
        """True if some parameter holds no data yet: the module is to be built, not overwritten."""
        return any(s.is_meta and s.kind == "parameter" for s in self.specs)


@dataclass(frozen=True, slots=True)
class MappedView:
    """A target that is a view of one stored tensor's bytes; numbers in elements."""

    stored_name: str
    offset: int
    strides: Shape


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One target, where its values come from, and how it is laid out.

    Attributes:
        name: the module's first name; ``aliases`` are the others (ties).
        sources: keys of ``Plan.stored``.
        strides: of the target, in elements; dense.
        dtype, stored_dtype: safetensors names; several stored ones are joined by ``+``.
        copies: strided copies that cover the target; ``stored_name`` is a key of ``Plan.stored``.
        reduces: ``""``, ``"sum"`` or ``"mean"``; then every source covers the whole target.
        is_new: True for a new tensor that is committed, False for one overwritten in place.
        mapped: set if the target is a view of the mapped file and nothing is moved.
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

    @property
    def nbytes(self) -> int:
        """Bytes of the target."""
        return numel(self.shape) * BY_NAME[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two stored tensors that must be equal, since the module ties their names."""

    kept: PlannedTensor
    other: PlannedTensor


@dataclass(frozen=True)
class Plan:
    """What a load will do.

    Attributes:
        tensors: every target that gets values, in the file's order.
        comparisons: pairs compared before anything is written.
        report: all lists; ``problems`` is empty if the plan holds.
        stored: seen name (prefix taken off) → the stored tensor's spec.
        memory: what the load needs and what there is.
    """

    tensors: tuple[PlannedTensor, ...]
    comparisons: tuple[Comparison, ...]
    report: LoadReport
    options: Settings
    stored: Mapping[str, TensorSpec] = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        """True if the plan holds."""
        return not self.report.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that refuses the plan, one line each."""
        return self.report.problems

    @property
    def memory(self) -> MemoryReport:
        """What the load needs, and what is available."""
        return self.report.memory

    @property
    def bytes_to_write(self) -> int:
        """Bytes of all targets that are streamed."""
        return sum(t.nbytes for t in self.tensors if t.mapped is None)

    def raise_if_refused(self) -> None:
        """Raise PlanError with all problems in one line, unless the plan holds."""
        if self.ok:
            return
        problems = fold(self.problems)
        first = "; ".join(problems[:_SHOWN])
        count = len(problems)
        more = f"; … and {count - _SHOWN} more" if count > _SHOWN else ""
        raise PlanError(f"{printable(self.report.source)}: {first}{more}", report=self.report)


_SHOWN = 6
