"""What a load is: source, module, name table and options, settled once; and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import CheckpointError, PlanError
from streamload.core.options import FAR_GAP_BYTES, GAP_BYTES, SLOT_BYTES, Settings
from streamload.core.wording import printable
from streamload.engine.lanes.choice import settled, unholdable, unusable
from streamload.engine.on_layer import OnLayer
from streamload.hf.their_models import TheirModule, bind_by_library, their_module
from streamload.loading.meanings import with_meanings
from streamload.loading.own.own_code import OwnPart, with_own_code
from streamload.mapping.binding import Binding, Mapper, bind
from streamload.mapping.choose import choose_binding, under_prefix
from streamload.models.decoder import Decoder
from streamload.module.extra_state import extra_state_specs
from streamload.module.overlap import in_place_problems
from streamload.module.quantizing import quantized_plan, quantizing
from streamload.module.targets import targets_of, walk, wrapper_problems
from streamload.planning.build import build_plan
from streamload.planning.needed_memory import on_host
from streamload.planning.records import Plan, Targets
from streamload.saving.cache.through import cache_settings
from streamload.sources.base import Source
from streamload.system.gc_pause import calm


@dataclass(frozen=True)
class Job:
    """One load, before its plan.

    Attributes:
        source: the open checkpoint.
        module: what is loaded into, or None for a dict of tensors.
        settings: as they take effect.
        targets: the module's tensors.
        mapper: what names are bound by; None for equal names.
        binding: of the stored names.
        notices: what is known of the load before its plan.
        config: as in ``config.json``.
        theirs: the module, if it is one of transformers.
        transient_bytes: what the source takes to compute a tensor, beside what a plan knows of.
        own: what the module's own code does beside taking tensors.
    """

    source: Source
    module: nn.Module | None
    settings: Settings
    targets: Targets | None
    mapper: Mapper | None
    binding: Binding
    notices: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    theirs: TheirModule | None = None
    transient_bytes: int = 0
    own: OwnPart = field(default_factory=OwnPart)


@calm(lambda source: len(source.catalog))
def resolve(
    source: Source,
    module: nn.Module | None,
    settings: Settings,
    config: Mapping[str, Any] | None,
    mapping: str | Mapper = "auto",
    notices: tuple[str, ...] = (),
    theirs: TheirModule | None = None,
) -> Job:
    """Settle what a load is.

    Args:
        source: the open checkpoint.
        module: what is loaded into, or None for a dict of tensors.
        settings: as given.
        config: as in ``config.json``, where there is one.
        mapping: see ``load_into``.
        notices: what is known already.
        theirs: the module, where it was built as one of transformers.

    Raises:
        PlanError: the module holds tensors that cannot be loaded at all.
    """
    owners = [] if module is None else walk(module)
    try:
        targets = None if module is None else targets_of(module, owners)
        if targets is not None:
            targets = Targets((*targets.specs, *extra_state_specs(owners)))
    except PlanError as error:
        raise PlanError(f"{printable(source.path)}: {error}") from error
    if module is not None and any(p.is_meta for p in module.parameters()):
        settings = with_default_dtype(source, settings)
    if theirs is None and isinstance(mapping, str):
        theirs = their_module(module, settings.dtype)
    if theirs is not None and targets is not None:
        targets = theirs.targets(targets)
    settings = replace(settings, gap_bytes=FAR_GAP_BYTES if source.is_remote else GAP_BYTES)
    settings = _on_devices(settings, targets)
    is_empty = module is None or any(p.is_meta for p in module.parameters())
    settings = cache_settings(settings, is_empty=is_empty)
    if settings.mode == "auto":
        settings, why = _safe_mode(source, settings)
        notices = (*notices, *why)
    transient_bytes = 0
    mapper: Mapper | None
    if isinstance(mapping, str):
        if mapping != "auto":
            raise ValueError(
                f"mapping must be 'auto' or a map, not {mapping!r}; streamload.mapping_for("
                "model_type, config) gives the table of an architecture"
            )
        # transformers' name for the model inside of a class with a head, such as "bert".
        base = str(getattr(module, "base_model_prefix", "") or "")
        mapper, binding = choose_binding(
            config, source.catalog, targets, prefix=settings.prefix, base=base
        )
        found = None
        if module is not None:
            found = bind_by_library(source, module, theirs, settings.prefix, config, binding)
        if found is not None:
            mapper, binding, source = None, found.binding, found.source(source)
            transient_bytes, notices = found.transient_bytes, (*notices, *found.notices)
    else:
        mapper, binding = mapping, bind(mapping, under_prefix(source.catalog, settings.prefix))
    if config is None:
        with suppress(CheckpointError):  # a load by a mapping of the caller's own needs none
            config, _ = source.config()
    own = OwnPart()
    if module is not None and targets is not None:
        stored, prefix = under_prefix(source.catalog, settings.prefix), settings.prefix
        targets, binding, own = with_own_code(
            module, owners, source, stored, mapper, targets, binding, prefix
        )
        notices = (*notices, *own.notices)
    known = (notices, config, theirs, transient_bytes, own)
    return Job(source, module, settings, targets, mapper, binding, *known)


def with_default_dtype(source: Source, settings: Settings) -> Settings:
    """The settings for a new module: with the source's own dtype where none is asked for."""
    if settings.dtype is not None or not source.default_dtype:
        return settings
    return replace(settings, dtype=BY_NAME[source.default_dtype])


def _on_devices(settings: Settings, targets: Targets | None) -> Settings:
    """The settings with devices by number, also for what is overwritten where it is."""
    held = set() if targets is None else {s.device for s in targets.specs if not s.is_meta}
    if not settings.chunk_is_given and not all(map(on_host, held)):
        settings = replace(settings, chunk_bytes=SLOT_BYTES)
    return settled(settings, () if targets is None or targets.any_meta else held)


def _safe_mode(source: Source, settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """The settings, streaming if nothing should be mapped, and the reason."""
    is_changed = settings.on_layer is not None or settings.quantize is not None
    if is_changed or not source.is_replaced_whole:
        return replace(settings, mode="stream"), ()
    if reason := source.reason_to_read():
        return replace(settings, mode="stream"), (f"streamed and not mapped: {reason}",)
    return settings, ()


@calm(lambda job: len(job.source.catalog))
def plan_load(job: Job) -> Plan:
    """The plan of a load, with everything that refuses it but a lack of memory.

    Raises:
        MissingExtraError: ``quantize`` without torchao.
    """
    is_causal = isinstance(job.module, Decoder)
    adapter = job.source.adapter()
    return with_meanings(_plan(job), job.config, adapter, job.targets, is_causal=is_causal)


def _plan(job: Job) -> Plan:
    settings = job.settings
    plan = build_plan(
        job.source.catalog,
        job.mapper,
        job.targets,
        settings,
        source=job.source.path,
        binding=job.binding,
    )
    plan = plan.with_transient(job.transient_bytes + job.source.buffer_bytes)
    if job.theirs is not None:
        plan = replace(plan, model_type=job.theirs.model.config.model_type)
    plan = replace(plan, findings=()).noticed(*job.notices).with_findings(*plan.findings)
    plan = job.own.told(plan)
    device = settings.device
    devices = (device,) if isinstance(device, str) else sorted(set(device.values()))
    problems = [why for device in devices if (why := unusable(device))]
    if job.module is not None and job.targets is not None:
        plan = plan.with_findings(*wrapper_problems(job.targets, plan))
    problems = problems or _unholdable(plan)
    if settings.mode == "map" and job.source.is_remote:
        problems.append(
            "mode='map' needs a file on this machine: cache=True keeps a local copy that later "
            "loads map, and streamload convert or download makes one"
        )
    if job.module is not None:
        problems += in_place_problems(job.module, plan)
    hook = "on_layer" if settings.on_layer is not None else ""
    problems += _unfit_for_parts(plan)
    hook = f"quantize={settings.quantize!r}" if settings.quantize is not None else hook
    held = next((t.name for t in plan.tensors if not t.is_new), None)
    if hook and held is not None:
        problems.append(
            f"{held!r} holds data and is overwritten in place, so {hook} cannot be honoured: "
            "build the module under streamload.empty_weights()"
        )
    if hook and settings.cache:
        problems.append(f"cache keeps tensors as they are stored, so {hook} needs cache=False")
    if settings.quantize is not None and plan.ok and not problems:
        if job.module is not None:
            return quantized_plan(plan, job.module)
        problems.append("quantize needs a module, whose linear layers it can tell")
    return plan.refused(*problems)


def _unholdable(plan: Plan) -> list[str]:
    """Dtypes that a device has not, each told by the first tensor that would have it."""
    first: dict[tuple[str, str], str] = {}
    for tensor in plan.tensors:
        if tensor.is_new and not on_host(tensor.device):
            first.setdefault((tensor.device, tensor.dtype), tensor.name)
    return [
        f"{name!r}: device {device!r} cannot hold {dtype}: {why}; dtype= casts it"
        for (device, dtype), name in first.items()
        if (why := unholdable(device, dtype))
    ]


def _unfit_for_parts(plan: Plan) -> list[str]:
    """Options that take whole tensors, where the module holds parts of them."""
    part = next((t.name for t in plan.tensors if t.shard is not None), None)
    if part is None:
        return []
    options = plan.options
    asked = {
        "on_layer": options.on_layer is not None,
        f"quantize={options.quantize!r}": options.quantize is not None,
        "cache": options.cache,
        "layout='stored'": options.layout == "stored",
    }
    text = " and ".join(name for name, is_asked in asked.items() if is_asked)
    return [f"{part!r} is held in parts by several ranks: {text} is for whole ones"] if text else []


def hook_for(plan: Plan) -> OnLayer | None:
    """What is called with each block's tensors, if anything is; the plan must hold."""
    on_layer = plan.options.on_layer
    return quantizing(plan, on_layer) if plan.quantized else on_layer
