"""What is collected while a plan is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamload.core.findings import Finding
from streamload.core.options import Settings
from streamload.core.report import ShapeMismatch
from streamload.core.specs import TensorSpec
from streamload.core.wording import joined
from streamload.planning.records import Comparison, PlannedTensor, Targets


@dataclass
class PlanBuilder:
    """What is collected while a plan is built.

    ``nowhere`` are stored names and the targets they were mapped to, none of which the module has.
    ``stated`` are targets whose rule names its transform, be it the identity; ``examples`` are
    placed tensors of each kind there is, one for each block of a model.
    """

    stored: Mapping[str, TensorSpec]
    targets: Targets | None
    options: Settings
    placed: dict[str, PlannedTensor] = field(default_factory=dict)
    placed_by: dict[str, str] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    mismatches: list[ShapeMismatch] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    nowhere: dict[str, tuple[str, ...]] = field(default_factory=dict)
    troubled: set[str] = field(default_factory=set)
    incomplete: list[Finding] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    stated: set[str] = field(default_factory=set)
    examples: dict[tuple[object, ...], PlannedTensor] = field(default_factory=dict)

    def refuse(self, *reasons: str) -> None:
        """Add what refuses the plan."""
        self.findings += [Finding(reason, refuses=True) for reason in reasons]

    def note(self, *texts: str) -> None:
        """Add what a user should know."""
        self.findings += map(Finding, texts)

    def keep(self, target: str, planned: PlannedTensor, *, stated: bool) -> None:
        """Add what was planned for the name ``target``, by a stated transform or not.

        A second one for the same tensor is compared with the one before it, or refused.
        """
        before = self.placed.setdefault(planned.name, planned)
        if before is planned:
            self.placed_by[planned.name] = target
            if stated:
                self.stated.add(planned.name)
            return
        if self.placed_by[planned.name] == target:
            both = " and ".join(repr(joined(p.sources)) for p in (before, planned))
            self.refuse(f"{both} both fall on {target!r}")
            return
        first = planned if target == planned.name else before
        other = before if first is planned else planned
        self.placed[planned.name] = first
        self.placed_by[planned.name] = planned.name
        self.comparisons.append(Comparison(first, other))
