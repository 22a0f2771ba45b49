"""Which class a checkpoint is loaded into: a reference model, or one of transformers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from streamload.core.findings import Finding
from streamload.hf.installed import is_installed

if TYPE_CHECKING:
    from streamload.loading.calls import Loaded
    from streamload.loading.sharding import RankPlan
    from streamload.planning.records import Plan

transformers_option = click.option(
    "--transformers",
    "by_transformers",
    is_flag=True,
    help="Take transformers' class; the default where streamload has no model of its own.",
)


def hush_imports() -> None:
    """What torchao and torch log while transformers is imported is no news of this checkpoint."""
    for name in ("torchao", "torch.utils._pytree"):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)


def load_model(path: str, *, by_transformers: bool, **options: Any) -> Loaded:
    """Load a checkpoint into its reference model, else into transformers' class if it is there."""
    import streamload

    hush_imports()

    if by_transformers:
        return streamload.load_transformers(path, **options)
    if _is_only_theirs(path, options):
        loaded = streamload.load_transformers(path, **options)
        notices = (*loaded.report.notices, str(_fell_back(loaded.report.model_type)))
        return replace(loaded, report=replace(loaded.report, notices=notices))
    from streamload.loading.ahead import ahead_of_load, let_go

    # Where torch is there already, nothing is waited for.
    is_waiting = "torch" not in sys.modules
    with ahead_of_load(path, options) if is_waiting else nullcontext():
        load = streamload.load  # brings torch
    try:
        return load(path, **options)
    finally:
        let_go()


def load_over_ranks(
    path: str, how: str, *, by_transformers: bool, **options: Any
) -> tuple[Loaded, int]:
    """As ``load_model``, sharded over the ranks that torchrun started; and this rank's number."""
    from streamload.loading.sharding import load_sharded

    theirs = by_transformers or _is_only_theirs(path, options)
    return load_sharded(path, how, by_transformers=theirs, **options)


def plan_over_ranks(
    path: str, how: str, ranks: int, *, by_transformers: bool, **options: Any
) -> tuple[Plan, tuple[RankPlan, ...]]:
    """The plan of rank 0 of so many, and what each rank would read."""
    from streamload.loading.sharding import plan_sharded

    theirs = by_transformers or _is_only_theirs(path, options)
    return plan_sharded(path, how, ranks, by_transformers=theirs, **options)


def plan_model(path: str, *, by_transformers: bool, **options: Any) -> Plan:
    """The plan of what ``load_model`` would do."""
    hush_imports()
    from streamload.loading.calls import plan_checkpoint
    from streamload.loading.transformers_load import plan_transformers

    if by_transformers:
        return plan_transformers(path, **options)
    if _is_only_theirs(path, options):
        plan = plan_transformers(path, **options)
        return replace(plan, findings=(*plan.findings, _fell_back(plan.model_type)))
    return plan_checkpoint(path, **options)


def _fell_back(model_type: str | None) -> Finding:
    """What is said where another library's class is taken without being asked for."""
    return Finding(
        f"streamload has no model of its own for {model_type!r}: transformers' class is loaded"
    )


def _is_only_theirs(path: str, options: Mapping[str, Any]) -> bool:
    from streamload.mapping.tables.registry import known_model_types
    from streamload.sources.detect import open_checkpoint

    if not is_installed():
        return False
    reach = {name: options.get(name) for name in ("timeout_s", "download")}
    with open_checkpoint(path, **reach) as source:
        config, _ = source.config()
    known = known_model_types(with_model=True)
    return bool(config) and (config or {}).get("model_type") not in known
