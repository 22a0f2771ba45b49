"""``build_plan``: bind names, place every tensor, collect every problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from streamload.core.options import Settings
from streamload.core.report import LoadReport, MemoryReport
from streamload.core.specs import Catalog, TensorSpec
from streamload.mapping.binding import Assignment, Binding, Mapper, bind, bind_equal
from streamload.mapping.common import layer_of
from streamload.mapping.rules import NameMap
from streamload.planning.devices import device_problems
from streamload.planning.needed_memory import needed_bytes, staging_bytes
from streamload.planning.placing import PlanBuilder, place
from streamload.planning.problems import explain, listed
from streamload.planning.records import Plan, Targets
from streamload.planning.summary import (
    common_dtype,
    find_gaps,
    loaded_entries,
    map_notices,
    tied_groups,
)
from streamload.system.gc_pause import without_collections

__all__ = ["build_plan"]


def build_plan(
    catalog: Catalog,
    mapper: Mapper | None,
    targets: Targets | None,
    options: Settings | None = None,
    *,
    source: str = "",
) -> Plan:
    """Plan a load.

    Args:
        catalog: what is stored.
        mapper: a NameMap, a dict, a function, or None for equal names.
        targets: the module's tensors, or None to plan for mapped names without a module.
        options: what was asked for.
        source: the checkpoint's path, for messages.

    Returns:
        A plan; ``problems`` lists everything that refuses it. Never raises for a bad fit.
    """
    with without_collections(len(catalog)):
        return _build(catalog, mapper, targets, options or Settings(), source)


def _build(
    catalog: Catalog,
    mapper: Mapper | None,
    targets: Targets | None,
    options: Settings,
    source: str,
) -> Plan:
    stored = _under_prefix(catalog, options.prefix)
    binding = bind_equal(stored, targets) if mapper is None else bind(mapper, stored)
    builder = PlanBuilder(stored, targets, options)
    builder.problems += binding.problems
    builder.notices += catalog.notices
    builder.unexpected += _within_layers(binding.unexpected, options.layers)
    if targets is not None:
        builder.problems += device_problems(targets, options.device)
    for assignment in _chosen(binding, options, mapper):
        place(builder, assignment)
    if options.expected_layers is not None:
        builder.problems += _layer_count_problems(stored, binding, options.expected_layers)
    if options.layers is not None:
        absent = sorted(options.layers - _layers_found(stored, binding))
        builder.problems += [f"layers: the file has no block {listed(absent)}"] if absent else []
    return _finish(builder, binding, mapper, source)


def _under_prefix(catalog: Catalog, prefix: str | None) -> Mapping[str, TensorSpec]:
    if not prefix:
        return catalog.tensors
    start = prefix if prefix.endswith(".") else prefix + "."
    return {n[len(start) :]: spec for n, spec in catalog.items() if n.startswith(start)}


def _within_layers(names: Sequence[str], layers: frozenset[int] | None) -> list[str]:
    if layers is None:
        return list(names)
    return [n for n in names if (layer := layer_of(n)) is None or layer in layers]


def _chosen(binding: Binding, options: Settings, mapper: Mapper | None) -> list[Assignment]:
    """Assignments of the chosen layers; renumbered 0, 1, … if a model of just these is built."""
    if options.layers is None:
        return list(binding.assignments)
    kept = [a for a in binding.assignments if a.layer is None or a.layer in options.layers]
    if not options.renumber or not isinstance(mapper, NameMap):
        return kept
    place = {layer: at for at, layer in enumerate(sorted(options.layers))}
    return [
        a
        if a.layer is None
        else replace(a, targets=_renumbered(a.targets, a.layer, place), layer=place[a.layer])
        for a in kept
    ]


def _renumbered(names: tuple[str, ...], layer: int, place: Mapping[int, int]) -> tuple[str, ...]:
    old, new = f".{layer}.", f".{place[layer]}."
    return tuple(name.replace(old, new, 1) for name in names)


def _layers_found(stored: Mapping[str, TensorSpec], binding: Binding) -> set[int]:
    """The block indices in the file; by the table where it knows the name, else by the name."""
    names = {n for a in binding.assignments if a.layer is None for n in a.sources}
    found = {a.layer for a in binding.assignments if a.layer is not None}
    return found | {layer for n in stored if n not in names and (layer := layer_of(n)) is not None}


def _layer_count_problems(
    stored: Mapping[str, TensorSpec], binding: Binding, expected: int
) -> list[str]:
    found = _layers_found(stored, binding)
    if len(found) == expected and found == set(range(len(found))):
        return []
    have = f"{len(found)} layers ({listed(sorted(found))})" if found else "no layers"
    return [f"expected_layers={expected}, but the file has {have}"]


def _finish(builder: PlanBuilder, binding: Binding, mapper: Mapper | None, source: str) -> Plan:
    options = builder.options
    tensors = tuple(builder.placed.values())
    missing, unfilled = find_gaps(builder, mapper)
    unmatched = [builder.stored[name].name for name in builder.unexpected]
    problems, notices = explain(
        builder.problems,
        missing,
        unmatched,
        builder.mismatches,
        [name for name in unfilled if name not in builder.troubled],
        options.strict,
        loaded=len(tensors),
        stored=builder.stored,
        incomplete=builder.incomplete,
        ignored=binding.ignored,
    )
    report = LoadReport(
        source=source,
        model_type=mapper.model_type if isinstance(mapper, NameMap) else None,
        mode=options.mode,
        layout="stored" if options.stored_order else "contiguous",
        dtype=options.dtype.torch_name if options.dtype else common_dtype(tensors),
        device=options.device if isinstance(options.device, str) else "mixed",
        loaded=loaded_entries(builder),
        missing=tuple(missing),
        unexpected=tuple(unmatched),
        shape_mismatch=tuple(builder.mismatches),
        unfilled=tuple(unfilled),
        ignored=tuple(builder.stored[name].name for name in binding.ignored),
        tied=tied_groups(builder, mapper),
        problems=tuple(problems),
        notices=(
            *builder.notices,
            *(mapper.notices if isinstance(mapper, NameMap) else ()),
            *notices,
            *map_notices(builder),
        ),
        memory=MemoryReport(
            needed_bytes=needed_bytes(tensors, builder.stored, options),
            staging_bytes=staging_bytes(tensors, builder.stored, options),
        ),
    )
    return Plan(tensors, tuple(builder.comparisons), report, options, builder.stored)
