"""Places one assignment's targets: shapes, dtypes, strides, copies; misfits are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamload.core.dtypes import BY_NAME
from streamload.core.findings import Finding
from streamload.core.options import Settings
from streamload.core.report import ShapeMismatch
from streamload.core.specs import Shape, TensorSpec, is_row_major, numel
from streamload.core.wording import joined, listed
from streamload.mapping.applying import odd_parts, unfit_parts
from streamload.mapping.binding import Assignment
from streamload.mapping.chaining import ByExpert, alike
from streamload.mapping.combining import Mean
from streamload.mapping.layout import Layout, LayoutError
from streamload.mapping.transforms import UNSTATED
from streamload.planning.devices import device_of
from streamload.planning.dtype_rules import NEVER_CAST, DtypeError, refuse_mixed, target_dtype
from streamload.planning.geometry import Geometry, geometries
from streamload.planning.records import (
    Comparison,
    MappedView,
    PlannedTensor,
    Targets,
    TargetSpec,
)

_WIDEST = 16  # bytes of the widest element


@dataclass
class PlanBuilder:
    """What is collected while a plan is built.

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


def place(builder: PlanBuilder, assignment: Assignment) -> None:
    """Place one assignment's targets, or say why not."""
    specs = [builder.stored[name] for name in assignment.sources]
    wanted: list[TargetSpec | None] = [None] * len(assignment.targets)
    if builder.targets is not None:
        wanted = [builder.targets.by_name.get(name) for name in assignment.targets]
        if not any(wanted):
            builder.unexpected += assignment.sources
            return
    if assignment.absent or (builder.targets is not None and not all(wanted)):
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
        return
    kind = _kind(builder, assignment, specs[0], wanted[0])
    if kind is not None and (example := builder.examples.get(kind)) is not None:
        renamed = _renamed(example, assignment, wanted[0])
        _keep(builder, assignment, assignment.targets[0], renamed)
        return
    places = _places(builder, assignment, specs, wanted)
    for target, spec, geometry in zip(assignment.targets, wanted, places, strict=False):
        try:
            planned = _planned(builder, assignment, target, spec, geometry)
        except DtypeError as problem:
            names = joined(repr(s.name) for s in specs)
            builder.troubled.add(target)
            builder.findings.append(Finding(f" {problem}", True, target, f"{names}: "))
            continue
        if kind is not None:
            builder.examples[kind] = planned
        _keep(builder, assignment, target, planned)


def _kind(
    builder: PlanBuilder, assignment: Assignment, spec: TensorSpec, wanted: TargetSpec | None
) -> tuple[object, ...] | None:
    """What is equal for tensors that are placed alike; None for those of several parts."""
    sources, targets = assignment.sources, assignment.targets
    if len(sources) > 1 or len(targets) > 1 or not isinstance(builder.options.device, str):
        return None
    return (
        assignment.transform,
        spec.dtype,
        spec.shape,
        spec.strides,
        spec.extent and spec.extent.offset % _WIDEST,
        spec.encoding and (spec.stored_dtype, spec.made_dtype, spec.encoding.words),
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
    )


def _keep(
    builder: PlanBuilder, assignment: Assignment, target: str, planned: PlannedTensor
) -> None:
    first = builder.placed.setdefault(planned.name, planned)
    if first is planned:
        builder.placed_by[planned.name] = target
        if assignment.transform is not UNSTATED:
            builder.stated.add(planned.name)
    else:
        _settle(builder, target, first, planned)


def _places(
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


def _planned(
    builder: PlanBuilder,
    assignment: Assignment,
    target: str,
    spec: TargetSpec | None,
    geometry: Geometry,
) -> PlannedTensor:
    """The plan of one target whose shape fits."""
    options, layout = builder.options, geometry.layout
    names = assignment.sources
    if len(names) > 1:
        names = tuple(names[i] for i in geometry.used) or names
    specs = [builder.stored[name] for name in names]
    stored = tuple([BY_NAME[spec.made_dtype] for spec in specs])
    transform = assignment.transform
    for run in alike(transform, len(assignment.sources)):
        stack = assignment.sources[run.start : run.stop]
        refuse_mixed(stack, [builder.stored[n].made_dtype for n in stack], spec, options.dtype)
    reduces = transform.reduces if len(names) > 1 else ""
    dtype = target_dtype(target, stored, spec, options.dtype, reduces=reduces)
    is_new = spec is None or spec.is_meta or (spec.kind == "buffer" and _is_built(builder))
    device = options.device
    device = device if isinstance(device, str) else device_of(target, device)
    view = _mapped(builder, names, layout, dtype.name, device) if is_new and options.maps else None
    in_stored_order = is_new and (view is not None or options.stored_order)
    strides = geometry.strides(stored_order=in_stored_order and not transform.reduces)
    if spec is not None and not is_new:
        _refuse_in_place(builder, target, spec)
        strides, device = spec.strides or strides, spec.device
    return PlannedTensor(
        name=spec.names[0] if spec else target,
        aliases=spec.names[1:] if spec else (),
        sources=names,
        shape=layout.shape,
        strides=strides,
        dtype=dtype.name,
        stored_dtype="+".join(dict.fromkeys([d.name for d in stored])),
        copies=geometry.copies(assignment.sources, strides),
        transform=_label(transform.label, specs),
        reduces=reduces,
        tolerance=transform.tolerance if isinstance(transform, Mean) else 0.0,
        layer=assignment.layer,
        device=device,
        is_new=is_new,
        mapped=view,
    )


def _label(label: str, specs: Sequence[TensorSpec]) -> str:
    """What is done to the sources, decoding first."""
    words = dict.fromkeys(spec.encoding.words for spec in specs if spec.encoding is not None)
    return "+".join([*words, label] if label else words) if words else label


def _is_built(builder: PlanBuilder) -> bool:
    return builder.targets is not None and builder.targets.any_meta


def _refuse_in_place(builder: PlanBuilder, target: str, spec: TargetSpec) -> None:
    options = builder.options
    asked = [
        text
        for text, is_asked in (
            ("mode='map'", options.mode == "map"),
            ("layout='stored'", options.layout == "stored"),
        )
        if is_asked
    ]
    device = device_of(target, options.device)
    if device not in (spec.device, spec.device.partition(":")[0], "cpu"):
        asked.append(f"device={device!r}")
    if asked:
        raise DtypeError(
            f"holds data and is overwritten in place, so {' and '.join(asked)} cannot be honoured: "
            "leave it out, or build the module under streamload.empty_weights()"
        )


def _mapped(
    builder: PlanBuilder, names: tuple[str, ...], layout: Layout, dtype: str, device: str
) -> MappedView | None:
    """The view of the mapped file, if the target can be one as it is stored."""
    options, itemsize = builder.options, BY_NAME[dtype].itemsize
    if len(names) != 1 or not numel(layout.shape):
        return None
    spec = builder.stored[names[0]]
    view = layout.source_strides()
    if view is None or spec.extent is None or spec.dtype != dtype or device != "cpu":
        return None
    # Products with a transposed matrix of 16 bits are many times slower on most CPUs; those with
    # one of float32 are not.
    may_be_strided = options.stored_order or (options.leaves_layout and itemsize > 2)
    if not may_be_strided and not is_row_major(layout.shape, view[1]):
        return None
    if spec.extent.offset % itemsize:
        return None
    return MappedView(names[0], *view)


def _settle(
    builder: PlanBuilder, target: str, before: PlannedTensor, planned: PlannedTensor
) -> None:
    """A second tensor for the same target is compared with the one before it, or refused."""
    if builder.placed_by[planned.name] == target:
        both = " and ".join(repr(joined(p.sources)) for p in (before, planned))
        builder.refuse(f"{both} both fall on {target!r}")
        return
    first = planned if target == planned.name else before
    other = before if first is planned else planned
    builder.placed[planned.name] = first
    builder.placed_by[planned.name] = planned.name
    builder.comparisons.append(Comparison(first, other))
