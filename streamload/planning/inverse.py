"""The way back: which published tensors a module gives, and from where. Pure, as ``build``."""

from __future__ import annotations

from collections.abc import Mapping

from streamload.core.dtypes import BY_NAME
from streamload.core.options import Settings
from streamload.core.specs import Shape, StridedCopy, TensorSpec, contiguous_strides, numel
from streamload.mapping.applying import apply
from streamload.mapping.layout import Layout, LayoutError, inverse
from streamload.mapping.rules import NameMap, Rule
from streamload.planning.explaining import listed
from streamload.planning.gaps import layer_problem
from streamload.planning.placing import PlanBuilder
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
    for rule, layer in name_map.expand():
        locals_ = tuple(template.fill(layer=layer) for template in rule.target_templates)
        if not locals_ or not all(name in builder.stored for name in locals_):
            continue
        primary = {first_name.get(name, name) for name in locals_}
        if rule.optional and primary <= written:
            used.update(locals_)
            continue
        if rule.by_rank:
            builder.refuse(f"{', '.join(locals_)}: partitions cannot be exported to")
            continue
        written |= primary
        used.update(locals_)
        _go_back(builder, rule, layer, locals_)
    return used


def _go_back(builder: PlanBuilder, rule: Rule, layer: int | None, locals_: tuple[str, ...]) -> None:
    shapes = [builder.stored[name].shape for name in locals_]
    published = [template.fill(layer=layer) for template in rule.source_templates]
    local = ", ".join(map(repr, locals_))
    try:
        wanted, layouts = _back(rule, shapes, len(published))
    except LayoutError as error:
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
        _add(builder, name, locals_, shape, tuple(copies[name]), rule.transform.label)


def _back(rule: Rule, shapes: list[Shape], count: int) -> tuple[list[Shape], list[Layout]]:
    """Shapes of the published tensors, and the layouts of the module's in them.

    Raises:
        LayoutError: what is published would not give the module's tensors again, or not all of
            it would be written.
    """
    wanted = list(rule.transform.source_shapes(shapes))
    if len(wanted) != count:
        kind = rule.transform.label or "a plain copy"
        raise LayoutError(f"{kind} goes back to {len(wanted)} tensors, not {count}")
    layouts = apply(rule.transform, wanted, [None] * count, shapes)
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
    stored, wanted = BY_NAME[builder.stored[sources[0]].dtype], builder.options.dtype
    builder.placed[name] = PlannedTensor(
        name=name,
        aliases=(),
        sources=sources,
        shape=shape,
        strides=contiguous_strides(shape),
        dtype=(wanted if wanted is not None and stored.is_floating else stored).name,
        stored_dtype=stored.name,
        copies=copies if numel(shape) else (),
        transform=label,
    )
