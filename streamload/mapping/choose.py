"""``mapping="auto"``: a table of the architecture if one fits the module, else equal names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.core.specs import Catalog
from streamload.mapping.binding import Binding, bind_equal, bind_table
from streamload.mapping.fields import too_many
from streamload.mapping.registry import known_model_types, mappings_for
from streamload.mapping.rules import NameMap

__all__ = ["choose_mapper"]


def choose_mapper(
    config: Mapping[str, Any] | None,
    catalog: Catalog,
    targets: Mapping[str, object] | None,
    *,
    prefix: str | None = None,
) -> NameMap | None:
    """A table of the config's ``model_type``, or None for equal names.

    The one that places most stored names wins; of equal ones the published names, then the other
    tables, then equal names. So a file that already has the module's own names (a conversion to
    local names) is taken as it is.
    """
    tables = _tables(config)
    if not tables:
        return None
    if targets is None and too_many(tables[0].layers, len(catalog)):
        return tables[0]  # planning refuses it
    start = f"{prefix.rstrip('.')}." if prefix else ""
    stored = {n[len(start) :]: spec for n, spec in catalog.items() if n.startswith(start)}
    wanted = tables[0].target_names() if targets is None else set(targets)
    counts = [_placed(bind_table(table, stored), wanted) for table in tables]
    by_table = max(counts)
    by_name = _placed(bind_equal(stored, wanted), wanted)
    if by_table < by_name or (targets is not None and not by_table):
        return None
    return tables[counts.index(by_table)]


def _tables(config: Mapping[str, Any] | None) -> tuple[NameMap, ...]:
    model_type = config.get("model_type") if config else None
    if config is None or model_type not in known_model_types():
        return ()
    return mappings_for(str(model_type), config)


def _placed(binding: Binding, wanted: set[str]) -> int:
    return sum(len(a.sources) for a in binding.assignments if wanted.intersection(a.targets))
