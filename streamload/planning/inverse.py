"""The way back: which published tensors a module gives, and from where. Pure, as ``build``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from streamload.core.dtypes import BY_NAME
from streamload.core.options import Settings
from streamload.core.specs import Shape, StridedCopy, TensorSpec, contiguous_strides, numel
from streamload.mapping.applying import apply
from streamload.mapping.binding import names_of
from streamload.mapping.layout import Layout, LayoutError, inverse
from streamload.mapping.rules import NameMap, Rule
from streamload.mapping.transforms import Transform
from streamload.planning.dtype_rules import DtypeError, refuse_mixed, target_dtype
from streamload.planning.explaining import listed
from streamload.planning.gaps import layer_problem
from streamload.planning.placing.builder import PlanBuilder
from streamload.planning.placing.misfits import named
from streamload.planning.records import Plan, PlannedTensor, Targets


def build_export_plan(
    stored: Mapping[str, TensorSpec],
    name_map: NameMap | None,
    targets: Targets,
    options: Settings,
    *,
    source: str = "",
) -> Plan:
    """Plan an export.

    Args:
        stored: the module's real tensors by every name, with the strides they have.
        name_map: walked backwards; None gives the module's own names.
        targets: the module's tensors; ties are exported once, under the first name.
        options: ``dtype`` and the sizes of blocks are used.
        source: what is exported, for messages.
    """
    builder = PlanBuilder(stored, targets, options)
    first_name = {name: spec.names[0] for spec in targets.specs for name in spec.names}
    persistent = [s for s in targets.specs if s.persistent]
    wanted = [s for s in persistent if not s.is_meta]
    builder.refuse(
        *(
            f"{s.names[0]!r} is on the meta device: it has no values to export"
            for s in persistent
            if s.is_meta
        )
    )
    if name_map is None:
        for spec in wanted:
            _plain(builder, spec.names[0])
    else:
        used = _walk(builder, name_map, first_name)
        left = [s.names[0] for s in wanted if not used.intersection(s.names)]
        if left:
            builder.refuse(f"the name table has no place for {listed(map(repr, left))}")
    return Plan(
        tuple(builder.placed.values()),
        (),
        options,
        stored,
        source,
        name_map.model_type if name_map else None,
        options.dtype.torch_name if options.dtype else None,
        findings=tuple(builder.findings),
    )


def _plain(builder: PlanBuilder, name: str) -> None:
    spec = builder.stored[name]
    layout = Layout.whole(0, spec.shape, spec.strides)
    _add(builder, name, (name,), spec.shape, layout.copies((name,)))


def _walk(builder: PlanBuilder, name_map: NameMap, first_name: Mapping[str, str]) -> set[str]:
    """Every rule whose targets the module has; an alias of a tie already written is left out.

    Returns the names of the module's tensors that a rule was for.
    """
    written: set[str] = set()
    used: set[str] = set()
    absurd = layer_problem(name_map, len(builder.stored))
    if absurd:
        builder.refuse(absurd)
        return used
    present = name_map.experts(builder.stored)
    for rule, layer in name_map.expand():
        for experts in _runs(rule, present.get((id(rule), layer), [])):
            locals_ = names_of(rule.target_templates, layer, experts)
            absent = [name for name in locals_ if name not in builder.stored]
            if rule.unstacks:
                gaps = [at for at, expert in enumerate(experts) if at != expert][:1]
                absent += names_of(rule.target_templates, layer, gaps)
            if rule.unstacks and absent:
                builder.refuse(f"{named(locals_)} cannot be exported: {named(absent)} missing")
                used.update(locals_)
            if absent or not locals_:
                continue
            primary = {first_name.get(name, name) for name in locals_}
            if rule.optional and primary <= written:
                used.update(locals_)
                continue
            if rule.by_rank:
                builder.refuse(f"{named(locals_)}: partitions cannot be exported to")
                continue
            written |= primary
            used.update(locals_)
            _go_back(builder, rule, layer, experts, locals_)
    return used


def _runs(rule: Rule, present: Sequence[int]) -> list[Sequence[int | None]]:
    """The experts that the rule takes at once: all of a layer, or one after the other.

    ``present`` are those that the module has apart.
    """
    if not any(template.has("expert") for template in rule.target_templates):
        return [[None]]
    return [present] if rule.unstacks and present else [[expert] for expert in present]


def _go_back(
    builder: PlanBuilder,
    rule: Rule,
    layer: int | None,
    experts: Sequence[int | None],
    locals_: tuple[str, ...],
) -> None:
    specs = [builder.stored[name] for name in locals_]
    local = named(locals_)
    try:
        wanted, layouts = _back(rule.whole, tuple([spec.shape for spec in specs]))
        numbers = range(len(wanted) // len(rule.sources)) if rule.stacks else experts[:1]
        published = names_of(rule.source_templates, layer, numbers)
        if len(wanted) != len(published):
            kind = rule.transform.label or "a plain copy"
            raise LayoutError(f"{kind} goes back to {len(wanted)} tensors, not {len(published)}")
        if rule.unstacks:
            refuse_mixed(locals_, [spec.dtype for spec in specs], None, builder.options.dtype)
    except (LayoutError, DtypeError) as error:
        builder.refuse(f"{local} cannot be exported: {error}")
        return
    copies: dict[str, list[StridedCopy]] = {name: [] for name in published}
    for name, layout in zip(locals_, layouts, strict=True):
        strides = builder.stored[name].strides or contiguous_strides(layout.shape)
        for copy in layout.copies(published, strides):
            copies[copy.stored_name].append(inverse(copy, name))
    for name, shape in zip(published, wanted, strict=True):
        if name in builder.placed_by:
            builder.refuse(
                f"{name!r} would be written twice: from {builder.placed_by[name]} and from {local}"
            )
        builder.placed_by[name] = local
        used = tuple(dict.fromkeys(copy.stored_name for copy in copies[name])) or locals_
        _add(builder, name, used, shape, tuple(copies[name]), rule.transform.label)


@lru_cache(maxsize=1024)
def _back(
    transform: Transform, shapes: tuple[Shape, ...]
) -> tuple[Sequence[Shape], Sequence[Layout]]:
    """Shapes of the published tensors, and the layouts of the module's in them.

    Raises:
        LayoutError: what is published would not give the module's tensors again, or not all of
            it would be written.
    """
    wanted = transform.source_shapes(shapes)
    layouts = apply(transform, wanted, [None] * len(wanted), shapes)
    for layout, shape in zip(layouts, shapes, strict=True):
        if layout.shape != shape:
            raise LayoutError(f"shape {list(layout.shape)} comes back, not {list(shape)}")
    if sum(map(numel, wanted)) != sum(map(numel, shapes)):
        raise LayoutError("the parts do not fill what is published")
    return wanted, layouts


def _add(
    builder: PlanBuilder,
    name: str,
    sources: tuple[str, ...],
    shape: Shape,
    copies: tuple[StridedCopy, ...],
    label: str = "",
) -> None:
    wanted = builder.options.dtype
    found = [BY_NAME[builder.stored[source].dtype] for source in sources]
    try:
        stored = found[0] if len(set(found)) == 1 else target_dtype("", tuple(found), None, None)
    except DtypeError as error:
        builder.refuse(f"{name!r} cannot be exported: {error}")
        return
    builder.placed[name] = PlannedTensor(
        name=name,
        aliases=(),
        sources=sources,
        shape=shape,
        strides=contiguous_strides(shape),
        dtype=(wanted if wanted is not None and stored.is_floating else stored).name,
        stored_dtype="+".join(dict.fromkeys(dtype.name for dtype in found)),
        copies=copies if numel(shape) else (),
        transform=label,
    )
