"""``mapping="auto"``: a table of the architecture if one fits the module, else equal names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.core.specs import Catalog, TensorSpec
from streamload.mapping.binding import Binding, bind_equal, bind_table
from streamload.mapping.fields import too_many
from streamload.mapping.rules import NameMap
from streamload.mapping.tables.registry import known_model_types, mappings_for


def choose_binding(
    config: Mapping[str, Any] | None,
    catalog: Catalog,
    targets: Mapping[str, object] | None,
    *,
    prefix: str | None = None,
    base: str = "",
) -> tuple[NameMap | None, Binding]:
    """A table of the config's ``model_type``, or None for equal names; and what it binds.

    The one that places most stored names wins; of equal ones the published names, then the other
    tables, then equal names. So a file that already has the module's own names (a conversion to
    local names) is taken as it is. ``base``: see ``bind_equal``.
    """
    stored = under_prefix(catalog, prefix)
    tables = _tables(config)
    if not tables:
        return None, bind_equal(stored, targets, base)
    if targets is None and too_many(tables[0].layers, len(catalog)):
        return tables[0], bind_table(tables[0], stored)  # planning refuses it
    wanted = tables[0].target_names() if targets is None else set(targets)
    bindings = [bind_table(table, stored) for table in tables]
    counts = [_placed(binding, wanted) for binding in bindings]
    by_table = max(counts)
    by_name = bind_equal(stored, wanted, base)
    best = counts.index(by_table)
    renames = any(a.sources != a.targets for a in bindings[best].assignments)
    least = _placed(by_name, wanted) + (not renames)
    if by_table < least or (targets is not None and not by_table):
        return None, bind_equal(stored, None) if targets is None else by_name
    return tables[best], bindings[best]


def under_prefix(catalog: Catalog, prefix: str | None) -> Mapping[str, TensorSpec]:
    """The tensors whose names stand under ``prefix``, which is taken off."""
    if not prefix:
        return catalog.tensors
    start = prefix if prefix.endswith(".") else f"{prefix}."
    return {n[len(start) :]: spec for n, spec in catalog.items() if n.startswith(start)}


def _tables(config: Mapping[str, Any] | None) -> tuple[NameMap, ...]:
    model_type = config.get("model_type") if config else None
    if config is None or model_type not in known_model_types():
        return ()
    return mappings_for(str(model_type), config)


def _placed(binding: Binding, wanted: set[str]) -> int:
    return sum(len(a.sources) for a in binding.assignments if wanted.intersection(a.targets))
