"""``load``, ``load_into``, ``load_state_dict``, ``plan``: a few lines each over the same steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from streamload.adapters.opening import open_values
from streamload.core.display.cards import Card, Shown
from streamload.core.display.reports import load_card
from streamload.core.errors import PlanError
from streamload.core.options import LoadOptions, Settings, settings_from
from streamload.core.report import LoadReport
from streamload.core.signatures import shows_options
from streamload.core.wording import listed, printable
from streamload.loading.building import Prepare, build
from streamload.loading.resolving import resolve
from streamload.loading.running import Run, plan_only, run
from streamload.mapping.binding import Mapper
from streamload.module.commit import OnAssign, commit
from streamload.module.given import check_module
from streamload.module.joining import confirming, together
from streamload.planning.explaining import exact_notices, scale_notices
from streamload.planning.records import Plan
from streamload.sources.base import Source
from streamload.sources.config.generation_settings import GENERATION_FILE as _SETTINGS
from streamload.sources.config.generation_settings import generation_settings
from streamload.system.gc_pause import without_collections

# Making a model of some hundred modules is enough to set off a full collection, which walks all
# of torch: as long as the rest of a mapped load. Nothing here leaves cycles behind.
_MANY = 2000


@dataclass(frozen=True, repr=False)
class Loaded(Shown):
    """A model in eval mode, the report of its load, and its configuration.

    ``generation_config`` holds the settings of ``generation_config.json``, and those of
    ``config.json`` that it leaves open: ``eos_token_id``, ``temperature``, ``top_p``, ...
    """

    model: nn.Module
    report: LoadReport
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)

    def _card(self) -> Card:
        card = load_card(self.report, "Loaded")
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        model = f"{type(self.model).__name__}, {parameters:,} parameters"
        hint = "more: .model, .report, .config, .generation_config"
        return replace(card, facts=(("model", model), *card.facts), hint=hint)


@shows_options(mode="auto")
def load(path: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> Loaded:
    """Build the reference model for a checkpoint's ``config.json`` and stream the weights in.

    For a model of your own see ``load_into``, for a class of transformers ``load_transformers``.

    Args:
        path: a file, an index, a folder, raw GPT-NeoX partitions, or ``hf:ORG/NAME[@REVISION]``
            in the local hub cache.
        **options: see LoadOptions.

    Returns:
        ``.model`` (eval mode; called as ``model(ids)`` with a LongTensor [batch, n], returns
        logits [batch, n, vocabulary]), ``.report``, ``.config``, ``.generation_config``.

    Raises:
        CheckpointError: the files cannot be used.
        PlanError: the weights do not fit the configuration; ``.report`` lists everything.
        MemoryBudgetError: it would not fit in memory.
        ReadError: reading failed midway.
    """
    return load_prepared(path, settings_from(options, mode="auto"))


def load_prepared(
    path: str | os.PathLike[str], settings: Settings, prepare: Prepare | None = None
) -> Loaded:
    """As ``load``; ``prepare`` is called with the empty model, which it may shard."""
    # A mapped load is made of small records and nothing else; a streamed one may take its time.
    pause = without_collections(_MANY if settings.maps else 0)
    with pause, open_values(path, settings) as source:
        model, config, job = build(source, settings, prepare)
        held = source.companion(_SETTINGS) if _SETTINGS in source.companions else None
        generation, notices = generation_settings(source.path, config, held)
        with together(model, settings.timeout_s) as ranks:
            finished = run(job, ranks, attaches=True)
            commit(model, finished.plan, finished.loaded, confirm=confirming(ranks))
    if finished.larger is not None:
        finished.larger.attach(model)
    report = replace(finished.report, notices=(*finished.report.notices, *notices))
    # What an export writes as config.json: the model's own configuration has not all fields.
    model.published_config = config  # type: ignore[assignment]
    return Loaded(model.eval(), report, config, generation)


@shows_options(mode="stream")
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

    A module whose parameters are DTensors (``fully_shard``, ``parallelize_module``) is loaded by
    all of its ranks together: each calls this, reads its own parts, and gets them, or none does.

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
        RankError: another rank failed, is gone, or has another file, module or options.
        StreamloadError: as ``load``.
    """
    check_module(module, path)
    try:
        settings = replace(settings_from(options), expected_layers=expected_layers)
    except (TypeError, ValueError):
        with together(module):  # or the others would wait
            raise
    with (
        together(module, settings.timeout_s) as ranks,
        open_values(path, settings, kept=lambda: _kept(module, mapping)) as source,
    ):
        job = resolve(source, module, settings, _config(mapping, source), mapping)
        done = run(job, ranks)
        own, confirm = done.own, confirming(ranks)
        told = commit(module, done.plan, done.loaded, own=own, on_assign=on_assign, confirm=confirm)
    return replace(done.report, notices=(*done.report.notices, *told))


@shows_options(mode="stream")
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
    with open_values(path, settings, keeps_encoded=True) as source:
        job = resolve(source, None, settings, _config(mapping, source), mapping)
        done = run(job)
        known = {spec.name: spec for spec in done.plan.stored.values()}
        # There is no report that could say it.
        texts = [*done.plan.meaning, *scale_notices(known, known)]
        if settings.dtype is None:
            texts += exact_notices(known)
        if source.objects:
            left_out = listed(map(repr, source.objects))
            texts.append(f"extra states that are no tensors, left out: {left_out}")
        for text in dict.fromkeys(texts):
            warnings.warn(f"{printable(source.path)}: {text}", stacklevel=2)
        return _by_name(done)


@shows_options()
def plan(
    module: nn.Module | str | os.PathLike[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    mapping: str | Mapper = "auto",
    expected_layers: int | None = None,
    **options: Unpack[LoadOptions],
) -> Plan:
    """What a load would do; reads headers only, touches nothing.

    ``plan(path)`` plans ``load``, ``plan(module, path)`` plans ``load_into``, each with its own
    default ``mode``.

    Args:
        module: your own module; left out, the reference model that ``load`` would build.
        path: see ``load``.
        mapping: see ``load_into``; with a module only.
        expected_layers: see ``load_into``; with a module only.
        **options: see LoadOptions.

    Returns:
        ``.ok``, ``.problems``, ``.report`` (all lists) and ``.memory`` (needed, available).
    """
    if path is None and not isinstance(module, nn.Module):
        module, path = None, module
    if path is None:
        raise TypeError("plan needs a path: plan(path), or plan(module, path)")
    if module is None:
        if mapping != "auto" or expected_layers is not None:
            raise TypeError("mapping and expected_layers are for plan(module, path)")
        return plan_checkpoint(path, **options)
    return _plan_into(module, path, mapping, expected_layers, options)


def _plan_into(
    module: Any,
    path: str | os.PathLike[str],
    mapping: str | Mapper,
    expected_layers: int | None,
    options: LoadOptions,
) -> Plan:
    check_module(module, path)
    settings = replace(settings_from(options), expected_layers=expected_layers)
    pause = without_collections(_MANY)
    with pause, open_values(path, settings, kept=lambda: _kept(module, mapping)) as source:
        job = resolve(source, module, settings, _config(mapping, source), mapping)
        return plan_only(job)


def plan_checkpoint(path: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> Plan:
    """What ``load`` would do; reads headers only."""
    settings = settings_from(options, mode="auto")
    with open_values(path, settings) as source:
        return plan_only(build(source, settings)[2], attaches=True)


def _kept(module: nn.Module, mapping: str | Mapper) -> list[str]:
    """What is not used up by decoding: the module's own tensors, and what a dict names."""
    groups = module.named_parameters(), module.named_buffers()
    named = list(mapping) if isinstance(mapping, Mapping) else []
    return [*(name for group in groups for name, _ in group), *map(str, named)]


def _config(mapping: str | Mapper, source: Source) -> dict[str, Any] | None:
    """The configuration, which a mapping of the caller's own does not need."""
    return source.config()[0] if isinstance(mapping, str) else None


def _by_name(run: Run) -> dict[str, torch.Tensor]:
    """A run's tensors in the file's order, each under all of its names."""
    if run.loaded.modules:
        raise PlanError("on_layer returned a module, but load_state_dict has no module")
    tensors = {t.name: run.loaded.tensors[t.name] for t in run.plan.tensors}
    for group in run.plan.tied:
        tensor = next((tensors[name] for name in group if name in tensors), None)
        if tensor is not None:
            tensors.update(dict.fromkeys(group, tensor))
    return tensors
