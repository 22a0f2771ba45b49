"""What a transform makes of stored shapes, or what is recorded where that does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from streamload.core.findings import Finding
from streamload.core.report import ShapeMismatch
from streamload.core.specs import Shape, TensorSpec
from streamload.core.wording import joined, listed
from streamload.mapping.applying import odd_parts, unfit_parts
from streamload.mapping.binding import Assignment
from streamload.mapping.chaining import ByExpert
from streamload.mapping.layout import LayoutError
from streamload.planning.placing.builder import PlanBuilder
from streamload.planning.placing.geometry import Geometry, geometries
from streamload.planning.records import TargetSpec


def fitting(
    builder: PlanBuilder,
    assignment: Assignment,
    specs: Sequence[TensorSpec],
    wanted: Sequence[TargetSpec | None],
) -> Sequence[Geometry]:
    """Where the targets come from; empty if shapes do not fit (the mismatch is recorded)."""
    transform = assignment.transform
    shapes = tuple([spec.shape if spec else None for spec in wanted])
    try:
        places = geometries(
            transform,
            tuple([spec.shape for spec in specs]),
            tuple([spec.strides for spec in specs]),
            shapes,
        )
    except LayoutError as error:
        known = [shape for shape in shapes if shape is not None]
        parts = _unfit(assignment, specs, known) or _odd(assignment, specs)
        builder.mismatches += parts or [
            ShapeMismatch(spec.name, spec.shape, target, shape or (), str(error))
            for target, shape in zip(assignment.targets, shapes, strict=True)
            for spec in specs
        ]
        return []
    made = [place.layout.shape for place in places]
    needed = [shape if shape is not None else own for shape, own in zip(shapes, made, strict=True)]
    if (line := _other_number(assignment, specs, made, needed)) is not None:
        builder.incomplete.append(line)
        return []
    if not transform.reduces and (parts := _unfit(assignment, specs, needed)):
        builder.mismatches += parts
        return []
    if made != needed:
        source = joined(spec.name for spec in specs)
        builder.mismatches += [
            ShapeMismatch(
                source,
                specs[0].shape if len(specs) == 1 else own,
                target,
                shape,
                _as_stored(assignment, shape) if len(specs) == len(made) == 1 else "",
            )
            for target, own, shape in zip(assignment.targets, made, needed, strict=True)
            if own != shape
        ]
        return []
    return places


def _as_stored(assignment: Assignment, needed: Shape) -> str:
    """Which shape the file should have, where a transform makes that another than the module's."""
    try:
        (shape,) = assignment.transform.source_shapes([needed])
    except (LayoutError, ValueError):
        return ""
    return (
        "" if shape == needed else f"{list(shape)} as stored, before {assignment.transform.label}"
    )


def _unfit(
    assignment: Assignment, specs: Sequence[TensorSpec], needed: Sequence[Shape]
) -> list[ShapeMismatch]:
    """Which of several joined sources do not fit, where the transform knows their shapes."""
    if len(specs) == 1 or len(needed) != len(assignment.targets):
        return []
    return [
        ShapeMismatch(specs[at].name, specs[at].shape, assignment.targets[0], shape)
        for at, shape in unfit_parts(assignment.transform, [s.shape for s in specs], needed)
    ]


def _odd(assignment: Assignment, specs: Sequence[TensorSpec]) -> list[ShapeMismatch]:
    """Which of several stacked sources are not of the shape that most of them have."""
    target, why = assignment.targets[0], "as the others of its stack are"
    return [
        ShapeMismatch(specs[at].name, specs[at].shape, target, shape, why)
        for at, shape in odd_parts(assignment.transform, [s.shape for s in specs])
    ]


def _other_number(
    assignment: Assignment,
    specs: Sequence[TensorSpec],
    made: Sequence[Shape],
    needed: Sequence[Shape],
) -> Finding | None:
    """What to say where the module has room for more or fewer experts than are stored."""
    transform = assignment.transform
    if made == needed or not isinstance(transform, ByExpert) or transform.unstacks:
        return None
    have = len(specs) // transform.sources
    try:
        room = transform.experts(needed)
    except LayoutError:
        return None
    if room == have:
        return None
    if have < room:
        text = f"{named(assignment.beyond)} {'and so on ' if have + 1 < room else ''}missing"
    else:
        more = [specs[at * have + n] for at in range(transform.sources) for n in range(room, have)]
        text = f"{named([spec.name for spec in more])} too many"
    target = named(assignment.targets)
    return Finding(f"{target} has room for {room} experts, the file has {have}: {text}")


def named(names: Sequence[str]) -> str:
    """The first few names for a message, and how many there are."""
    return listed(map(repr, names), 4, more=", … ({total} in all)")
