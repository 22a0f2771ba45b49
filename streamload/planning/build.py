"""``build_plan``: bind names, place every tensor, collect every problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from streamload.core.options import Settings
from streamload.core.specs import Catalog, TensorSpec, contiguous_strides
from streamload.mapping.binding import Assignment, Binding, Mapper, bind, bind_equal
from streamload.mapping.choose import under_prefix
from streamload.mapping.common import layer_of
from streamload.mapping.rules import NameMap
from streamload.planning.devices import device_problems
from streamload.planning.explaining import explain, listed, wanted_sources
from streamload.planning.gaps import common_dtype, fate_of, find_gaps, map_notices, tied_groups
from streamload.planning.mending import explaining_prefix, square_findings
from streamload.planning.needed_memory import needed_memory
from streamload.planning.placing.builder import PlanBuilder
from streamload.planning.placing.placement import place
from streamload.planning.records import Plan, PlannedTensor, Targets
from streamload.system.gc_pause import without_collections


def build_plan(
    catalog: Catalog,
    mapper: Mapper | None,
    targets: Targets | None,
    options: Settings | None = None,
    *,
    source: str = "",
    binding: Binding | None = None,
) -> Plan:
    """Plan a load.

    Args:
        catalog: what is stored.
        mapper: a NameMap, a dict, a function, or None for equal names.
        targets: the module's tensors, or None to plan for mapped names without a module.
        options: what was asked for.
        source: the checkpoint's path, for messages.
        binding: of the mapper's names, where it is known already.

    Returns:
        A plan; ``problems`` lists everything that refuses it. Never raises for a bad fit.
    """
    options = options or Settings()
    with without_collections(len(catalog)):
        stored = under_prefix(catalog, options.prefix)
        if binding is None:
            binding = bind(mapper, stored) if mapper is not None else bind_equal(stored, targets)
        builder = PlanBuilder(stored, targets, options)
        builder.refuse(*catalog.problems, *binding.problems)
        builder.note(*catalog.notices)
        builder.unexpected += _within_layers(binding.unexpected, options.layers)
        if targets is not None:
            builder.refuse(*device_problems(targets, options.device))
        for assignment in _chosen(binding, options, mapper):
            place(builder, assignment)
        builder.refuse(*_layer_problems(stored, binding, options))
        return _finished(builder, binding, mapper, source)


def _within_layers(names: Sequence[str], layers: frozenset[int] | None) -> list[str]:
    if layers is None:
        return list(names)
    return [n for n in names if (layer := layer_of(n)) is None or layer in layers]


def _chosen(binding: Binding, options: Settings, mapper: Mapper | None) -> Sequence[Assignment]:
    """Assignments of the chosen layers; renumbered 0, 1, … if a model of just these is built."""
    if options.layers is None:
        return binding.assignments
    kept = [a for a in binding.assignments if a.layer is None or a.layer in options.layers]
    if not options.renumber or not isinstance(mapper, NameMap):
        return kept
    numbers = {layer: at for at, layer in enumerate(sorted(options.layers))}
    return [
        a
        if a.layer is None
        else replace(
            a,
            targets=tuple(
                name.replace(f".{a.layer}.", f".{numbers[a.layer]}.", 1) for name in a.targets
            ),
            layer=numbers[a.layer],
        )
        for a in kept
    ]


def _layer_problems(
    stored: Mapping[str, TensorSpec], binding: Binding, options: Settings
) -> list[str]:
    """Blocks that were asked for or expected, and what the file has instead."""
    wanted, expected = options.layers, options.expected_layers
    if wanted is None and expected is None:
        return []
    # Block indices are the table's where it knows the name, else those in the name itself.
    known = {n for a in binding.assignments if a.layer is None for n in a.sources}
    found = {a.layer for a in binding.assignments if a.layer is not None}
    found |= {layer for n in stored if n not in known and (layer := layer_of(n)) is not None}
    problems = []
    if expected is not None and (len(found) != expected or found != set(range(len(found)))):
        have = f"{len(found)} layers ({listed(sorted(found))})" if found else "no layers"
        problems.append(f"expected_layers={expected}, but the file has {have}")
    absent = sorted((wanted or frozenset()) - found)
    if absent:
        problems.append(f"layers: the file has no block {listed(absent)}")
    return problems


def _finished(builder: PlanBuilder, binding: Binding, mapper: Mapper | None, source: str) -> Plan:
    options, stored = builder.options, builder.stored
    table = mapper if isinstance(mapper, NameMap) else None
    if options.maps:
        _map_apart(builder)
    tensors = tuple(builder.placed.values())
    missing, unfilled = find_gaps(builder, table)
    builder.note(*(table.notices if table else ()))
    unexpected = tuple([stored[name].name for name in builder.unexpected])
    ignored = tuple([stored[name].name for name in binding.ignored])
    builder.findings += square_findings(builder)
    hint = explaining_prefix(builder, mapper, missing)
    fate = fate_of(builder, missing)
    wanted = wanted_sources(mapper, binding, stored, missing)
    builder.findings += explain(builder, missing, unexpected, unfilled, ignored, hint, fate, wanted)
    builder.note(*map_notices(builder))
    return Plan(
        tensors,
        tuple(builder.comparisons),
        _as_it_came(options, tensors),
        stored,
        source,
        table.model_type if table else None,
        options.dtype.torch_name if options.dtype else common_dtype(tensors),
        tuple(missing),
        unexpected,
        tuple(builder.mismatches),
        tuple(unfilled),
        ignored,
        tied_groups(builder, table),
        tuple(builder.findings),
        needed_memory(tensors, stored, options),
        missing_are=fate,
    )


def _as_it_came(options: Settings, tensors: Sequence[PlannedTensor]) -> Settings:
    """The options with what ``mode="auto"`` came to."""
    if options.mode != "auto":
        return options
    mapped = [t for t in tensors if t.mapped is not None]
    strided = any(t.strides != contiguous_strides(t.shape) for t in mapped)
    layout = options.layout or ("stored" if strided else "contiguous")
    return replace(options, mode="map" if mapped else "stream", layout=layout)


def _map_apart(builder: PlanBuilder) -> None:
    """Views of stored tensors that lie over each other in a file: only one of them is mapped.

    Else what a program does to one parameter would also be done to another.
    """
    stored, placed = builder.stored, builder.placed
    extents = {}
    for tensor in placed.values():
        if tensor.mapped is not None:
            extent = stored[tensor.mapped.stored_name].extent
            assert extent is not None, "only these are mapped"
            extents[tensor.mapped.stored_name] = (extent.file, extent.offset, extent.nbytes)
    shared = set()
    last, end = "", 0
    for name, (file, offset, nbytes) in sorted(extents.items(), key=lambda found: found[1]):
        if file == last and offset < end:
            shared.add(name)
        end = max(end, offset + nbytes) if file == last else offset + nbytes
        last = file
    for name, tensor in placed.items() if shared else ():
        if tensor.mapped is not None and tensor.mapped.stored_name in shared:
            placed[name] = replace(tensor, mapped=None)
