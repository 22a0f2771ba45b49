"""Which tensors a conversion writes, and from where: pure, as ``build``; builds no model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streamload.core.dtypes import BY_NAME
from streamload.core.options import Settings
from streamload.core.specs import Catalog, TensorSpec
from streamload.mapping.choose import choose_binding
from streamload.mapping.common import layer_of
from streamload.mapping.fields import quantisation
from streamload.mapping.rules import NameMap, Rule
from streamload.mapping.tables.registry import known_model_types, mapping_for
from streamload.mapping.transforms import Identity
from streamload.planning.build import build_plan
from streamload.planning.composing import compose
from streamload.planning.explaining import listed
from streamload.planning.inverse import build_export_plan
from streamload.planning.records import Comparison, Plan, Targets, TargetSpec

_HEAD = "lm_head.weight"
# In the header of a file with local names: those under which its tied weights were stored, if
# under several. They are written once; the way back writes them under all of these.
_TIES_KEY = "streamload_ties"


@dataclass(frozen=True)
class Conversion:
    """What is written.

    Attributes:
        plan: its tensors are the new checkpoint's; its comparisons must hold.
        names: ``"published"``, ``"local"``, or ``"stored"`` where there is no name table, or the
            checkpoint is not just what its table knows.
        config: for ``config.json``; None if nothing is known.
        metadata: for the headers: what the way back cannot know from the tensors.
    """

    plan: Plan
    names: str
    config: Mapping[str, Any] | None
    metadata: Mapping[str, str] = field(default_factory=dict)


def plan_conversion(
    catalog: Catalog,
    config: Mapping[str, Any] | None,
    names: str,
    options: Settings,
    *,
    source: str = "",
) -> Conversion:
    """Plan a conversion; ``plan.problems`` lists everything that refuses it.

    Args:
        catalog: what is stored.
        config: as in ``config.json``, or None.
        names: ``"published"`` or ``"local"``.
        options: ``dtype`` and the sizes of blocks are used.
        source: the checkpoint's path, for messages.
    """
    quantised = quantisation(config)
    if quantised:
        said = f"the weights are quantised: config.json has {quantised}"
        plan = build_plan(catalog, None, None, options, source=source)
        if options.dtype is not None or names == "local":
            reason = "casts and local names are for plain numbers: leave both out for a copy"
            if options.dtype is None:
                reason = (
                    "local names are for plain numbers: a dtype (--dtype bfloat16) decodes them"
                )
            return Conversion(plan.refused(f"{said}; {reason}"), "stored", config)
        kept = "names, layout and values are kept as stored"
        return Conversion(plan.noticed(f"{said}; {kept}"), "stored", config)
    table = _published_table(config, catalog)
    reason = ""
    if table is None:
        kind = f"model_type {config.get('model_type')!r}" if config else "it: no config.json"
        reason = f"no name table for {kind}"
    elif names == "published":
        reason = _beyond_table(catalog, config, table, options, source)
    if table is None or reason:
        plan = build_plan(catalog, None, None, options, source=source)
        plan = plan.noticed(f"{reason}; names and layout are kept as stored")
        return Conversion(plan.refused(*_quantised(catalog, config, options)), "stored", config)
    stored_map, _ = choose_binding(config, catalog, None)
    if names == "published" and stored_map == table:
        return Conversion(_renamed(catalog, table, options, source), names, config)
    local = _local_plan(catalog, stored_map or _unchanged(table), table, options, source)
    noted = catalog.metadata.get(_TIES_KEY, "").split()
    if names == "published" and local.ok:
        return Conversion(_published(local, table, noted), names, config)
    twice = noted or [t.name for c in local.comparisons for t in (c.kept, c.other)]
    return Conversion(local, names, config, {_TIES_KEY: " ".join(twice)} if twice else {})


def _beyond_table(
    catalog: Catalog,
    config: Mapping[str, Any] | None,
    table: NameMap,
    options: Settings,
    source: str,
) -> str:
    """Why the names of another model than the table's are kept; empty where they are its own.

    Nothing of the table's model may be missing but the head: a name that is misspelt is refused.
    """
    mapper = choose_binding(config, catalog, None)[0] or _unchanged(table)
    plan = build_plan(catalog, mapper, None, replace(options, strict=False), source=source)
    quantised = any(_quantised(catalog, config, options))
    known = len(catalog) - len(plan.unexpected)
    if known and not quantised and any(n != _HEAD for n in plan.missing):
        return ""
    if not known:
        return f"no name fits the table of {table.model_type}"
    if plan.unexpected:
        count, names = len(plan.unexpected), listed(map(repr, plan.unexpected), 4)
        unknown = "name is" if count == 1 else "names are"
        return f"{count} {unknown} not in the table of {table.model_type} ({names})"
    return f"there is no {_HEAD!r}" if plan.missing else ""


def _quantised(
    catalog: Catalog, config: Mapping[str, Any] | None, options: Settings
) -> Iterator[str]:
    """A cast of numbers that mean nothing without their scales is refused."""
    if options.dtype is None:
        return
    stored = (config or {}).get("quantization_config")
    scaled = any(BY_NAME[s.dtype].kind == "float8" for s in catalog.tensors.values()) and any(
        "scale" in name.rpartition(".")[2] for name in catalog
    )
    if stored or scaled:
        method = stored.get("quant_method") if isinstance(stored, Mapping) else None
        says = f"config.json has a quantization_config ({method})" if stored else "it has scales"
        yield (
            f"the checkpoint is quantised ({says}): a cast would change what its numbers mean; "
            "without a dtype they are copied as they are"
        )


def _published_table(config: Mapping[str, Any] | None, catalog: Catalog) -> NameMap | None:
    model_type = config.get("model_type") if config else None
    if config is None or model_type not in known_model_types():
        return None
    try:
        table = mapping_for(str(model_type), config)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None  # as for a load: a config that cannot be followed leaves names as they are
    if table.layers is not None:
        return table
    layers = [n for name in catalog if (n := layer_of(name)) is not None]
    return replace(table, layers=max(layers, default=-1) + 1)


def _local_plan(
    catalog: Catalog, mapper: NameMap, table: NameMap, options: Settings, source: str
) -> Plan:
    plan = build_plan(catalog, mapper, None, options, source=source)
    if not plan.unexpected and plan.missing == (_HEAD,):  # a model without one is whole
        lenient = replace(options, strict=False)
        plan = build_plan(catalog, mapper, None, lenient, source=source)
    return _tied(_left_out(plan), table.ties)


def _unchanged(table: NameMap) -> NameMap:
    """The table for a file that has local names already."""
    rules: dict[tuple[str, ...], Rule] = {}
    for rule in table.rules:
        for target in rule.targets:
            rules.setdefault((target,), Rule(target, target, optional=rule.optional))
    return replace(table, rules=tuple(rules.values()))


def _renamed(catalog: Catalog, table: NameMap, options: Settings, source: str) -> Plan:
    """Published names to published names: bytes stay, wrappers of the names go."""
    checked = build_plan(catalog, table, None, options, source=source)
    if not checked.ok:
        return checked

    def canonical(name: str) -> str | None:
        ((rule, at, values),) = table.find(name, len(catalog[name].shape))
        return None if rule.ignores else rule.source_templates[at].fill(**values)

    plan = build_plan(catalog, canonical, None, options, source=source)
    plan = _left_out(replace(plan, model_type=table.model_type))
    published = {local: _published_names(table, local) for group in table.ties for local in group}
    return _tied(plan, [[n for local in g for n in published[local]] for g in table.ties])


def _published_names(table: NameMap, local: str) -> list[str]:
    return [
        rule.sources[0]
        for rule in table.rules
        if rule.targets == (local,) and isinstance(rule.transform, Identity)
    ]


def _published(local: Plan, table: NameMap, stored_twice: Collection[str]) -> Plan:
    """Local names to published ones: the table walked backwards, over the plan to local names.

    Tied weights are written under the first name, and under all of ``stored_twice``.
    """
    first = {tensor.name: tensor for tensor in local.tensors}
    aliases = {g[0]: tuple(g) for g in table.ties if g[0] in first}
    specs = tuple(
        TargetSpec(aliases.get(t.name, (t.name,)), t.shape, t.dtype, is_meta=False)
        for t in local.tensors
    )
    stored = {
        name: TensorSpec(name, spec.dtype, spec.shape, local.source)
        for spec in specs
        for name in spec.names
    }
    first |= {name: first[g] for g, names in aliases.items() for name in names}
    options = local.options
    back = build_export_plan(stored, table, Targets(specs), options, source=local.source)
    tensors, problems = compose(first, back.tensors, options.dtype)
    for group in table.ties:
        names = [n for name in group for n in _published_names(table, name)]
        kept = [tensor for tensor in tensors if tensor.name in names]
        more = [n for name in group if name in stored_twice for n in _published_names(table, name)]
        tensors += [replace(t, name=n) for t in kept[:1] for n in more if n != t.name]
    return replace(local, tensors=tuple(tensors)).with_findings(*back.findings).refused(*problems)


def _tied(plan: Plan, groups: Sequence[Sequence[str]]) -> Plan:
    """Each tie written once, under its first name; what else is stored of it is compared."""
    if not plan.ok:
        return plan
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    comparisons = list(plan.comparisons)
    problems: list[str] = []
    notices: list[str] = []
    for group in groups:
        held = [name for name in group if name in tensors]
        if not held:
            problems.append(f"missing: {' or '.join(map(repr, group))}")
            continue
        kept = tensors[held[0]]
        for name in held[1:]:
            comparisons.append(Comparison(kept, tensors.pop(name)))
            notices.append(f"{name!r} is tied to {group[0]!r} and left out")
        if held[0] != group[0]:
            notices.append(f"{held[0]!r} is tied to {group[0]!r} and written under that name")
            tensors = {
                (group[0] if name == held[0] else name): tensor for name, tensor in tensors.items()
            }
            tensors[group[0]] = replace(kept, name=group[0])
    plan = replace(plan, tensors=tuple(tensors.values()), comparisons=tuple(comparisons))
    return plan.refused(*problems).noticed(*notices)


def _left_out(plan: Plan) -> Plan:
    if not plan.ignored:
        return plan
    names = listed(map(repr, plan.ignored), 4)
    return plan.noticed(
        f"{len(plan.ignored)} stored buffers that no model loads are left out: {names}"
    )
