"""From a path and options to a plan: the model or module, its name table, what else is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from streamload.core.errors import PlanError, printable
from streamload.core.options import Settings
from streamload.loading.budget import check_memory
from streamload.loading.configuration import config_of, find_config, refuse_too_many_layers
from streamload.loading.preparing import prepare
from streamload.mapping.binding import Mapper
from streamload.mapping.choose import choose_mapper
from streamload.mapping.chosen_layers import LayersError, select_layers
from streamload.mapping.registry import build_model
from streamload.module.commit import targets_of
from streamload.module.empty_weights import empty_weights
from streamload.planning import Plan, Targets, build_plan
from streamload.sources.base import Source

__all__ = ["Built", "build", "config_for", "mapper_for", "plan_open"]


@dataclass(frozen=True)
class Built:
    """An empty reference model; ``config`` is its own, ``file_config`` that of all layers."""

    model: nn.Module
    config: dict[str, Any]
    file_config: dict[str, Any]
    settings: Settings
    notices: tuple[str, ...]


def build(source: Source, settings: Settings) -> Built:
    """The empty reference model; of just the chosen layers if some are chosen."""
    file_config, notices = find_config(source)
    config = file_config
    refuse_too_many_layers(file_config, source, settings.layers)
    try:
        if settings.layers is not None:
            config = select_layers(config, sorted(settings.layers))
            settings = replace(settings, renumber=True)
        with empty_weights():
            model = build_model(config["model_type"], config)
    except LayersError as error:
        raise PlanError(printable(f"{source.path}: {error}")) from error
    # torch's own errors, for absurd sizes, have its C++ stack on further lines.
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        first = str(error).partition("\n")[0]
        text = printable(f"{source.path}: config.json: {first}")
        raise PlanError(text) from error
    return Built(model, config, file_config, settings, notices)


def config_for(mapping: str | Mapper, source: Source) -> dict[str, Any] | None:
    """The configuration, which a mapping of the caller's own does not need."""
    return config_of(source)[0] if isinstance(mapping, str) else None


def mapper_for(
    mapping: str | Mapper,
    config: dict[str, Any] | None,
    source: Source,
    targets: Targets | None,
    settings: Settings,
) -> Mapper | None:
    """The map to bind names by; None for equal names (and known wrappers)."""
    if isinstance(mapping, str):
        if mapping != "auto":
            raise ValueError(f"mapping must be 'auto' or a map, not {mapping!r}")
        return choose_mapper(config, source.catalog, targets, prefix=settings.prefix)
    return mapping


def plan_open(
    module: nn.Module,
    source: Source,
    settings: Settings,
    config: dict[str, Any] | None,
    mapping: str | Mapper,
) -> Plan:
    """The plan of a load into ``module``; it may be refused, and memory may be too little.

    Raises:
        PlanError: the module holds tensors that cannot be loaded at all.
    """
    try:
        targets = targets_of(module)
    except PlanError as error:
        raise PlanError(f"{printable(source.path)}: {error}") from error
    mapper = mapper_for(mapping, config, source, targets, settings)
    made = build_plan(source.catalog, mapper, targets, settings, source=source.path)
    return check_memory(prepare(made, module, settings), settings, refuse=False)
