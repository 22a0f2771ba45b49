"""Places one assignment's targets, or records why they cannot be."""

from __future__ import annotations

from collections.abc import Sequence

from streamload.core.findings import Finding
from streamload.core.specs import TensorSpec
from streamload.core.wording import joined
from streamload.mapping.binding import Assignment
from streamload.mapping.transforms import UNSTATED
from streamload.planning.dtype_rules import NEVER_CAST, DtypeError
from streamload.planning.placing.builder import PlanBuilder
from streamload.planning.placing.laying_out import laid_out
from streamload.planning.placing.misfits import fitting, named
from streamload.planning.records import MappedView, PlannedTensor, TargetSpec

_WIDEST = 16  # bytes of the widest element


def place(builder: PlanBuilder, assignment: Assignment) -> None:
    """Place one assignment's targets, or say why not."""
    stored, targets = builder.stored, builder.targets
    specs = [stored[name] for name in assignment.sources]
    if targets is None:
        wanted: list[TargetSpec | None] = [None] * len(assignment.targets)
    else:
        find = targets.by_name.get
        wanted = [find(name) for name in assignment.targets]
        if not any(wanted):
            builder.unexpected += assignment.sources
            builder.nowhere.update(dict.fromkeys(assignment.sources, assignment.targets))
            return
    if assignment.absent or (targets is not None and not all(wanted)):
        _leave_out(builder, assignment, wanted)
        return
    kind = _kind(builder, assignment, specs[0], wanted[0])
    example = None if kind is None else builder.examples.get(kind)
    stated = assignment.transform is not UNSTATED
    if example is not None:
        planned = _renamed(example, assignment, wanted[0])
        builder.keep(assignment.targets[0], planned, stated=stated)
        return
    places = fitting(builder, assignment, specs, wanted)
    for at, (geometry, spec) in enumerate(zip(places, wanted, strict=False)):
        target = assignment.targets[at]
        try:
            planned = laid_out(builder, assignment, target, spec, geometry)
        except DtypeError as problem:
            names = joined(repr(s.name) for s in specs)
            builder.troubled.add(target)
            builder.findings.append(Finding(f" {problem}", True, target, f"{names}: "))
            continue
        if kind is not None:
            builder.examples[kind] = planned
        builder.keep(target, planned, stated=stated)


def _leave_out(
    builder: PlanBuilder, assignment: Assignment, wanted: Sequence[TargetSpec | None]
) -> None:
    """Record an assignment of which the file or the module has not all tensors."""
    pairs = zip(assignment.targets, wanted, strict=True)
    lacking = assignment.absent or [name for name, spec in pairs if spec is None]
    where = "" if assignment.absent else " from the module"
    line = Finding(
        f"{joined(map(repr, assignment.sources))} cannot fill {named(assignment.targets)}: "
        f"{named(lacking)} {'is' if len(lacking) == 1 else 'are'} missing{where}",
        refuses=assignment.by_rank,
    )
    if assignment.by_rank:
        builder.troubled.update(assignment.targets)
        builder.findings.append(line)
    else:
        builder.incomplete.append(line)


def _kind(
    builder: PlanBuilder, assignment: Assignment, spec: TensorSpec, wanted: TargetSpec | None
) -> tuple[object, ...] | None:
    """What is equal for tensors that are placed alike; None for those of several parts."""
    sources, targets = assignment.sources, assignment.targets
    if len(sources) > 1 or len(targets) > 1 or not isinstance(builder.options.device, str):
        return None
    extent, encoding = spec.extent, spec.encoding
    return (
        assignment.transform,
        spec.dtype,
        spec.shape,
        spec.strides,
        extent and extent.offset % _WIDEST,
        encoding and (spec.stored_dtype, spec.made_dtype, encoding.words),
        targets[0].endswith(NEVER_CAST),
        wanted and wanted.traits,
    )


def _renamed(
    example: PlannedTensor, assignment: Assignment, wanted: TargetSpec | None
) -> PlannedTensor:
    """The plan of a tensor of the same kind."""
    (source,), (target,) = assignment.sources, assignment.targets
    view = example.mapped
    return PlannedTensor(
        wanted.names[0] if wanted else target,
        wanted.names[1:] if wanted else (),
        assignment.sources,
        example.shape,
        example.strides,
        example.dtype,
        example.stored_dtype,
        tuple([copy.of(source) for copy in example.copies]),
        example.transform,
        example.reduces,
        example.tolerance,
        assignment.layer,
        example.device,
        example.is_new,
        view and MappedView(source, view.offset, view.strides),
        example.shard,
        example.whole_shape,
    )
