"""What a plan leaves open and what it says of itself, once everything is placed."""

from __future__ import annotations

from collections.abc import Sequence

from streamload.core.dtypes import BY_NAME
from streamload.core.report import LoadedTensor
from streamload.mapping.binding import Mapper
from streamload.mapping.common import layer_of
from streamload.mapping.fields import short, too_many
from streamload.mapping.registry import layer_count_field
from streamload.mapping.rules import NameMap
from streamload.planning.placing import PlanBuilder
from streamload.planning.problems import listed
from streamload.planning.records import PlannedTensor, TargetSpec

__all__ = [
    "common_dtype",
    "find_gaps",
    "layer_problem",
    "loaded_entries",
    "map_notices",
    "tied_groups",
]


def find_gaps(builder: PlanBuilder, mapper: Mapper | None) -> tuple[list[str], list[str]]:
    """Names that nothing fills (``missing``), and names left on meta (``unfilled``)."""
    wrong = {entry.name for entry in builder.mismatches} | builder.troubled
    if builder.targets is None:
        absurd = layer_problem(mapper, len(builder.stored))
        if absurd:
            builder.problems.append(absurd)
            return [], []
        expected = _expected(mapper, builder.options.layers)
        return [n for n in expected if n not in builder.placed and n not in wrong], []
    missing: list[str] = []
    unfilled: list[str] = []
    kept: list[str] = []
    for spec in builder.targets.specs:
        if spec.names[0] in builder.placed or not _takes_part(builder, spec):
            continue
        if spec.is_meta:
            unfilled.append(spec.names[0])
        if not spec.persistent or wrong.intersection(spec.names):
            continue
        if spec.kind == "buffer" and not spec.is_meta:
            kept.append(spec.names[0])
        else:
            missing.append(spec.names[0])
    if kept:
        builder.notices.append(f"buffers not in the file, kept as built: {listed(kept)}")
    return missing, unfilled


def layer_problem(mapper: Mapper | None, tensors: int) -> str | None:
    """Why a table is not walked through layer by layer, if its number of layers is absurd."""
    if not isinstance(mapper, NameMap) or not too_many(mapper.layers, tensors):
        return None
    of_config = f"config.json: {layer_count_field(mapper.model_type)!r}"
    field = of_config if mapper.model_type else "the table's layers="
    return f"{field} is {short(mapper.layers)}, but there are only {tensors} tensors"


def _expected(mapper: Mapper | None, layers: frozenset[int] | None) -> list[str]:
    if not isinstance(mapper, NameMap):
        return []
    return [
        template.fill(layer=layer)
        for rule, layer in mapper.expand()
        if not rule.optional and (layer is None or layers is None or layer in layers)
        for template in rule.target_templates
    ]


def _takes_part(builder: PlanBuilder, spec: TargetSpec) -> bool:
    layers = builder.options.layers
    if layers is None or builder.options.renumber:
        return True
    layer = layer_of(spec.names[0])
    return layer is None or layer in layers


def loaded_entries(builder: PlanBuilder) -> tuple[LoadedTensor, ...]:
    """One ledger entry for each placed tensor."""
    stored = builder.stored
    return tuple(
        LoadedTensor(
            tuple(stored[name].name for name in t.sources),
            t.name,
            "+".join(_torch_name(name) for name in t.stored_dtype.split("+")),
            _torch_name(t.dtype),
            t.shape,
            t.transform,
        )
        for t in builder.placed.values()
    )


def _torch_name(name: str) -> str:
    return BY_NAME[name].torch_name or name


def tied_groups(builder: PlanBuilder, mapper: Mapper | None) -> tuple[tuple[str, ...], ...]:
    """Groups of names that are one tensor after the load."""
    if builder.targets is not None:
        return tuple(s.names for s in builder.targets.specs if len(s.names) > 1)
    return mapper.ties if isinstance(mapper, NameMap) else ()


def common_dtype(tensors: Sequence[PlannedTensor]) -> str | None:
    """The one floating dtype of all targets, or None where they differ."""
    floats = {t.dtype for t in tensors if BY_NAME[t.dtype].is_floating}
    return _torch_name(floats.pop()) if len(floats) == 1 else None


def map_notices(builder: PlanBuilder) -> list[str]:
    """Which tensors of a ``mode="map"`` load are streamed after all."""
    if builder.options.mode != "map":
        return []
    streamed = [t.name for t in builder.placed.values() if t.mapped is None]
    if not streamed:
        return []
    return [
        f"{len(streamed)} of {len(builder.placed)} tensors cannot be mapped as they are stored "
        f"(cast, re-laid or misaligned) and are streamed: {listed(streamed, 4)}"
    ]
