"""Models larger than memory: what stays of a mapped one, said beforehand and seen to afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from streamload.core.errors import CheckpointError
from streamload.loading.budget import measured
from streamload.planning.records import Plan
from streamload.residency.choice import (
    Residency,
    choose_residents,
    residency_notice,
    with_residency,
)
from streamload.residency.direct import AgainFile
from streamload.residency.streamer import attach
from streamload.sources.base import Source
from streamload.system.memory import available_memory
from streamload.system.peaks import StatusReader


@dataclass(frozen=True)
class Larger:
    """A model of which not all fits.

    Attributes:
        residency: what stays, and what is read for each pass.
        files: open, by path.
    """

    residency: Residency
    files: Mapping[str, AgainFile]

    def attach(self, model: nn.Module) -> None:
        """Have the model's blocks streamed, once its weights are mapped."""
        attach(model, self.residency, self.files, available=lambda: available_memory().bytes)


def larger_than_memory(plan: Plan, module: nn.Module | None) -> Residency | None:
    """What stays of a mapped model that does not fit; None where it does.

    Args:
        plan: with what there is of memory measured.
        module: whose load it is.
    """
    if module is None or not plan.ok or not plan.options.check_memory:
        return None
    if not any(tensor.mapped is not None for tensor in plan.tensors):
        return None
    return choose_residents(plan, file_bytes=_file_bytes(), lookups=_lookups(plan, module))


def told(plan: Plan, residency: Residency | None) -> Plan:
    """The plan, which says that not all fits."""
    if residency is None:
        return plan
    plan = replace(plan, memory=with_residency(plan.memory, residency))
    return plan.noticed(residency_notice(plan, residency))


def measured_for(plan: Plan, module: nn.Module | None) -> Plan:
    """The plan with what memory there is now, and what will not stay in it."""
    plan = measured(plan)
    return told(plan, larger_than_memory(plan, module))


def opened(residency: Residency | None, source: Source) -> Larger | None:
    """The files that are read again and again, while they surely are those that were mapped."""
    if residency is None:
        return None
    paths = {extent.file for block in residency.blocks for extent in block.extents}
    try:
        files = {path: AgainFile(path) for path in sorted(paths)}
        source.check_unchanged()
    except CheckpointError:  # not openable any more: the mapping serves
        return None
    return Larger(residency, files)


def _file_bytes() -> int:
    """Pages of files in this process, which a pass through a model does not push out."""
    with StatusReader() as status:
        return status.read().file


def _lookups(plan: Plan, module: nn.Module) -> set[str]:
    """Tables of which a pass reads a few rows only, since nothing else is made of them."""
    tables = {
        f"{path}.weight"
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, nn.Embedding)
    }
    return {t.name for t in plan.tensors if tables.issuperset((t.name, *t.aliases))}
