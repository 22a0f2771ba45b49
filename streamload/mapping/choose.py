"""``mapping="auto"``: the architecture's table if it fits the module, else equal names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.mapping.binding import Binding, bind_equal, bind_table
from streamload.mapping.registry import known_model_types, mapping_for
from streamload.mapping.rules import NameMap
from streamload.specs import Catalog

__all__ = ["choose_mapper"]


def choose_mapper(
    config: Mapping[str, Any] | None,
    catalog: Catalog,
    targets: Mapping[str, object] | None,
    *,
    prefix: str | None = None,
) -> NameMap | None:
    """The table of the config's ``model_type``, or None for equal names.

    The one that places more stored names wins, the table if both place as many; so a file that
    already has the module's own names (a conversion to local names) is taken as it is.
    """
    table = _table(config)
    if table is None:
        return None
    start = f"{prefix.rstrip('.')}." if prefix else ""
    stored = {n[len(start) :]: spec for n, spec in catalog.items() if n.startswith(start)}
    wanted = table.target_names() if targets is None else set(targets)
    by_table = _placed(bind_table(table, stored), wanted)
    by_name = _placed(bind_equal(stored, wanted), wanted)
    return table if by_table >= by_name and (by_table or targets is None) else None


def _table(config: Mapping[str, Any] | None) -> NameMap | None:
    model_type = config.get("model_type") if config else None
    if config is None or model_type not in known_model_types():
        return None
    try:
        return mapping_for(str(model_type), config)
    except (KeyError, TypeError, ValueError):
        # A config that cannot be followed does not stop a load by equal names.
        return None


def _placed(binding: Binding, wanted: set[str]) -> int:
    return sum(len(a.sources) for a in binding.assignments if wanted.intersection(a.targets))
