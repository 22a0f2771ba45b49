"""What a plan leaves open and what it says of itself, once everything is placed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from streamload.core.dtypes import BY_NAME
from streamload.mapping.common import layer_of
from streamload.mapping.fields import short, too_many
from streamload.mapping.rules import NameMap
from streamload.mapping.tables.registry import layer_count_field
from streamload.planning.explaining import listed
from streamload.planning.placing.builder import PlanBuilder
from streamload.planning.records import PlannedTensor, TargetSpec

_INITIALISED = "initialised by transformers"
_LEFT, _ON_META = "left unchanged", "left on meta without values"


def find_gaps(builder: PlanBuilder, table: NameMap | None) -> tuple[list[str], list[str]]:
    """Names that nothing fills (``missing``), and names left on meta (``unfilled``)."""
    wrong = {entry.name for entry in builder.mismatches} | builder.troubled
    if builder.targets is None:
        absurd = layer_problem(table, len(builder.stored))
        if absurd:
            builder.refuse(absurd)
            return [], []
        expected = _expected(table, builder.options.layers)
        return [n for n in expected if n not in builder.placed and n not in wrong], []
    missing: list[str] = []
    unfilled: list[str] = []
    kept: list[str] = []
    for spec in builder.targets.specs:
        if spec.names[0] in builder.placed or not _takes_part(builder, spec):
            continue
        if spec.is_meta and not spec.is_made_later:
            unfilled.append(spec.names[0])
        if not spec.persistent or wrong.intersection(spec.names):
            continue
        if spec.kind == "buffer" and not spec.is_meta:
            kept.append(spec.names[0])
        else:
            missing.append(spec.names[0])
    if kept:
        builder.note(f"buffers not in the file, kept as built: {listed(kept)}")
    return missing, unfilled


def fate_of(builder: PlanBuilder, missing: Sequence[str]) -> str:
    """What becomes of what is missing where that does not refuse the load, in words."""
    if builder.options.strict or builder.targets is None or not missing:
        return ""
    specs = [builder.targets[name] for name in missing]
    counts = Counter(
        _INITIALISED if s.is_made_later else _ON_META if s.is_meta else _LEFT for s in specs
    )
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {fate}" for fate, count in counts.items())


def layer_problem(table: NameMap | None, tensors: int) -> str | None:
    """Why a table is not walked through layer by layer, if its number of layers is absurd."""
    if table is None or not too_many(table.layers, tensors):
        return None
    of_config = f"config.json: {layer_count_field(table.model_type)!r}"
    field = of_config if table.model_type else "the table's layers="
    return f"{field} is {short(table.layers)}, but there are only {tensors} tensors"


def _expected(table: NameMap | None, layers: frozenset[int] | None) -> list[str]:
    if table is None:
        return []
    return [
        template.fill(layer=layer)
        for rule, layer in table.expand()
        if not rule.optional and (layer is None or layers is None or layer in layers)
        for template in rule.target_templates
        if not template.has("expert")  # how many there are, only a file says
    ]


def _takes_part(builder: PlanBuilder, spec: TargetSpec) -> bool:
    layers = builder.options.layers
    if layers is None or builder.options.renumber:
        return True
    layer = layer_of(spec.names[0])
    return layer is None or layer in layers


def tied_groups(builder: PlanBuilder, table: NameMap | None) -> tuple[tuple[str, ...], ...]:
    """Groups of names that are one tensor after the load."""
    if builder.targets is not None:
        return tuple(s.names for s in builder.targets.specs if len(s.names) > 1)
    return table.ties if table else ()


def common_dtype(tensors: Sequence[PlannedTensor]) -> str | None:
    """The one floating dtype of all targets, or None where they differ."""
    floats = {t.dtype for t in tensors if BY_NAME[t.dtype].is_floating}
    return BY_NAME[floats.pop()].torch_name if len(floats) == 1 else None


def map_notices(builder: PlanBuilder) -> list[str]:
    """Which tensors of a load that maps are streamed after all."""
    options = builder.options
    streamed = [t for t in builder.placed.values() if t.mapped is None]
    is_cast = options.mode == "auto" and len(streamed) == len(builder.placed)
    if not options.maps or not streamed or is_cast:
        return []
    reasons = Counter(_why_streamed(builder, tensor) for tensor in streamed)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return [
        f"{len(streamed)} of {len(builder.placed)} tensors are not mapped but streamed: {counts}"
    ]


def _why_streamed(builder: PlanBuilder, tensor: PlannedTensor) -> str:
    """Why a target is no view of the file, in a word or two; see ``placing``."""
    specs = [builder.stored[name] for name in tensor.sources]
    if tensor.device != "cpu":
        return f"on {tensor.device}"
    if not tensor.is_new:
        return "overwritten in place"
    if any(spec.encoding is not None or spec.extent is None for spec in specs):
        return "decoded"
    if any(spec.dtype != tensor.dtype for spec in specs):
        return "cast"
    if len(specs) > 1:
        return "of several stored ones"
    itemsize = BY_NAME[tensor.dtype].itemsize
    if any(spec.extent is not None and spec.extent.offset % itemsize for spec in specs):
        return "misaligned"
    if "transpose" in tensor.transform:
        return f"transposed ({itemsize * 8} bits: faster to compute with in rows)"
    return "rearranged"
