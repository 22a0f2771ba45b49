"""``load``, ``load_into``, ``load_state_dict``, ``plan``."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from streamload.core.errors import PlanError, note_overwritten
from streamload.core.options import LoadOptions, Settings, settings_from
from streamload.core.report import LoadReport
from streamload.engine.execute import Execution, execute
from streamload.engine.lanes.choice import lane_for
from streamload.engine.lanes.cuda import CudaMeter
from streamload.engine.on_layer import OnLayer
from streamload.loading.budget import check_memory, is_cache_in_the_way
from streamload.loading.building import build, config_for, mapper_for, plan_open
from streamload.loading.preparing import hook_for, prepare
from streamload.mapping.binding import Mapper
from streamload.module.commit import OnAssign, commit, existing_tensors
from streamload.planning import Plan, build_plan
from streamload.saving.cache.through import cache_settings, through_cache
from streamload.sources.base import Source
from streamload.sources.detect import open_layers
from streamload.system.gc_pause import without_collections
from streamload.system.peaks import MemoryPeaks, PeakSampler

__all__ = [
    "Loaded",
    "load",
    "load_into",
    "load_state_dict",
    "plan",
    "plan_checkpoint",
]

# Making a model of some hundred modules is enough to set off a full collection, which walks all
# of torch: as long as the rest of a mapped load. Nothing here leaves cycles behind.
_MANY = 2000


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, the report of its load, and its configuration."""

    model: nn.Module
    report: LoadReport
    config: dict[str, Any]


def load(path: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> Loaded:
    """Build the reference model for a checkpoint's ``config.json`` and stream the weights in.

    Args:
        path: a file, an index, a folder, raw GPT-NeoX partitions, or ``hf:ORG/NAME[@REVISION]``
            in the local hub cache.
        **options: see LoadOptions.

    Returns:
        ``.model`` (eval mode; called as ``model(ids)`` with a LongTensor [batch, n], returns
        logits [batch, n, vocabulary]), ``.report``, ``.config``.

    Raises:
        CheckpointError: the files cannot be used.
        PlanError: the weights do not fit the configuration; ``.report`` lists everything.
        MemoryBudgetError: it would not fit in memory.
        ReadError: reading failed midway.
    """
    settings = settings_from(options)
    # A mapped load is made of small records and nothing else; a streamed one may take its time.
    with without_collections(_MANY if settings.mode == "map" else 0):
        return _load(path, settings)


def _load(path: str | os.PathLike[str], settings: Settings) -> Loaded:
    with open_layers(path, settings.layers) as source:
        built = build(source, settings)
        report = _load_open(
            built.model,
            source,
            built.settings,
            config=built.file_config,
            mapping="auto",
            on_assign=None,
        )
    report = replace(report, notices=(*built.notices, *report.notices))
    # What an export writes as config.json: the model's own configuration has not all fields.
    built.model.published_config = built.config  # type: ignore[assignment]
    return Loaded(built.model.eval(), report, built.config)


def load_into(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    mapping: str | Mapper = "auto",
    expected_layers: int | None = None,
    on_assign: OnAssign | None = None,
    **options: Unpack[LoadOptions],
) -> LoadReport:
    """Stream a checkpoint into your own module.

    Parameters on the meta device get new tensors, all committed together after the last byte
    has arrived; on any exception the module is exactly as it was. Parameters that hold data are
    overwritten in place, keeping dtype and device.

    Args:
        module: build it under ``streamload.empty_weights()`` to start without memory.
        path: see ``load``.
        mapping: ``"auto"`` (the table of the config's architecture if its names fit the module,
            else equal names, with or without known wrappers), a NameMap, a dict stored name →
            module name, or a function of the stored name (None: ignored).
        expected_layers: refuse a file whose block indices are not 0 … expected_layers - 1.
        on_assign: called with (stored name, module name) before each assignment.
        **options: see LoadOptions.

    Raises:
        As ``load``.
    """
    settings = replace(settings_from(options), expected_layers=expected_layers)
    with open_layers(path, settings.layers) as source:
        return _load_open(
            module,
            source,
            settings,
            config=config_for(mapping, source),
            mapping=mapping,
            on_assign=on_assign,
        )


def load_state_dict(
    path: str | os.PathLike[str],
    *,
    mapping: str | Mapper = "auto",
    **options: Unpack[LoadOptions],
) -> dict[str, torch.Tensor]:
    """All tensors under their mapped names, without a module; tied names share one tensor.

    Args:
        path: see ``load``.
        mapping: see ``load_into``; ``"auto"`` gives local names where the config's architecture
            has a table, else stored names.
        **options: see LoadOptions.
    """
    settings = settings_from(options)
    with open_layers(path, settings.layers) as source:
        mapper = mapper_for(mapping, config_for(mapping, source), source, None, settings)
        settings = cache_settings(settings, is_empty=True)
        made = build_plan(source.catalog, mapper, None, settings, source=source.path)
        made = prepare(made, None, settings)
        made.raise_if_refused()
        made, run = _carry_out(made, source, settings, {}, settings.on_layer)
        if run.modules:
            raise PlanError("on_layer returned a module, but load_state_dict has no module")
        tensors = {t.name: run.tensors[t.name] for t in made.tensors}
        for group in made.report.tied:
            held = next((tensors[name] for name in group if name in tensors), None)
            if held is not None:
                tensors.update(dict.fromkeys(group, held))
        return tensors


def plan(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    mapping: str | Mapper = "auto",
    expected_layers: int | None = None,
    **options: Unpack[LoadOptions],
) -> Plan:
    """What ``load_into`` would do; reads headers only, touches nothing.

    Returns:
        ``.ok``, ``.problems``, ``.report`` (all lists) and ``.memory`` (needed, available).
    """
    settings = replace(settings_from(options), expected_layers=expected_layers)
    with open_layers(path, settings.layers) as source:
        return plan_open(module, source, settings, config_for(mapping, source), mapping)


def plan_checkpoint(path: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> Plan:
    """What ``load`` would do; reads headers only."""
    settings = settings_from(options)
    with open_layers(path, settings.layers) as source:
        built = build(source, settings)
        made = plan_open(built.model, source, built.settings, built.file_config, "auto")
    notices = (*built.notices, *made.report.notices)
    return replace(made, report=replace(made.report, notices=notices))


def _load_open(
    module: nn.Module,
    source: Source,
    settings: Settings,
    *,
    config: dict[str, Any] | None,
    mapping: str | Mapper,
    on_assign: OnAssign | None,
) -> LoadReport:
    start_s = time.perf_counter()
    settings = cache_settings(settings, is_empty=any(p.is_meta for p in module.parameters()))
    made = plan_open(module, source, settings, config, mapping)
    made.raise_if_refused()
    existing = existing_tensors(module, made)
    on_layer = hook_for(made, module, settings)
    meter = CudaMeter(t.device for t in made.tensors)
    with PeakSampler() as sampler:
        followed, run = _carry_out(made, source, settings, existing, on_layer)
    elapsed_s = time.perf_counter() - start_s
    report = _report(followed, run, sampler.peaks, meter.peak_bytes(), elapsed_s)
    try:
        # Last of all: what is raised behind it would find the module changed.
        commit(
            module,
            made,
            run.tensors,
            modules=run.modules,
            given=run.given,
            on_assign=on_assign,
        )
    except BaseException as error:
        if run.overwritten:
            note_overwritten(error, run.overwritten)
        raise
    return report


def _carry_out(
    made: Plan,
    source: Source,
    settings: Settings,
    existing: dict[str, torch.Tensor],
    on_layer: OnLayer | None,
) -> tuple[Plan, Execution]:
    """Carry a plan out if it fits in memory; from the cache if that is asked for.

    Returns:
        The plan that was followed, with what memory there is, and what came of it.
    """
    if not settings.cache:
        made = check_memory(made, settings)
        return made, _execute(made, source, settings, existing, on_layer)

    def checked(plan: Plan, plan_source: Source) -> Execution:
        fitting = check_memory(plan, settings)
        return _execute(fitting, plan_source, settings, existing, on_layer)

    made, run = through_cache(made, source, settings, checked)
    return check_memory(made, settings, refuse=False), run


def _execute(
    made: Plan,
    source: Source,
    settings: Settings,
    existing: dict[str, torch.Tensor],
    on_layer: OnLayer | None,
) -> Execution:
    # Neither a caller's inference mode nor its default device may reach the tensors made here.
    with torch.inference_mode(mode=False), torch.device("cpu"):
        return execute(
            made,
            source,
            lane_for(
                (t.device for t in made.tensors),
                chunk_bytes=settings.chunk_bytes,
                passing=on_layer is not None,
            ),
            existing=existing,
            progress=settings.progress,
            release=is_cache_in_the_way(made),
            on_layer=on_layer,
        )


def _report(
    made: Plan, run: Execution, peaks: MemoryPeaks, device_bytes: int, elapsed_s: float
) -> LoadReport:
    memory = replace(
        made.report.memory,
        peak_rss_bytes=max(peaks.rss_bytes, 0),
        peak_anonymous_bytes=max(peaks.anonymous_bytes, 0),
        peak_file_bytes=max(peaks.file_bytes, 0),
        peak_device_bytes=device_bytes,
    )
    return replace(
        made.report,
        notices=(*made.report.notices, *run.notices),
        bytes_read=run.bytes_read,
        bytes_written=run.bytes_written,
        bytes_mapped=sum(t.nbytes for t in made.tensors if t.mapped is not None),
        elapsed_s=elapsed_s,
        memory=memory,
    )
