"""``export``: a module back to published names, as one file or a folder transformers can load."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from streamload.core.errors import PlanError
from streamload.core.options import bound_of_shards, settings_from
from streamload.core.report import ExportReport
from streamload.core.signatures import answers_unknown
from streamload.core.wording import listed
from streamload.hf.library import is_model
from streamload.hf.their_exports import plan_their_export
from streamload.mapping.binding import Mapper
from streamload.mapping.common import layer_of
from streamload.mapping.rules import NameMap, Rule
from streamload.mapping.tables.gpt2_names import gpt2_map
from streamload.mapping.tables.registry import known_model_types, mapping_for
from streamload.models.decoder import Decoder
from streamload.module.extra_state import exported
from streamload.module.given import check_module
from streamload.module.joining import together
from streamload.module.sharded import is_dtensor
from streamload.module.targets import is_wrapper, targets_of
from streamload.planning.inverse import build_export_plan
from streamload.planning.records import Targets, TargetSpec
from streamload.ranks.together import Together
from streamload.saving.checkpoint import peak_memory, write_checkpoint
from streamload.saving.extras import config_text
from streamload.saving.file_layout import only_writable
from streamload.saving.parts import Parts, write_parts
from streamload.sources.in_memory import MemorySource
from streamload.system.peaks import PeakSampler


@answers_unknown
def export(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    mapping: str | Mapper = "auto",
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int | None = None,
) -> ExportReport:
    """Write a module's parameters, persistent buffers and extra states under published names.

    Extra states that are no plain tensors are left out, and listed in the report's notices. Of a
    module of DTensors every rank calls this with the same arguments, and writes its own parts into
    files on a file system that all of them see; no tensor is gathered.

    Args:
        module: on any device; never changed. Ties are written once.
        path: one file if it ends in ``.safetensors``, otherwise a folder that gets shards, an
            index and ``config.json``. What was there stays whole until the new files are.
        mapping: ``"auto"`` (published names of the module's architecture, the module's own names
            if there is no table for it), or what ``load_into`` was given.
        dtype: cast floating-point tensors to it.
        max_shard_bytes: tensor data in one file, at most; a folder only.

    Raises:
        PlanError: a parameter has no published name, holds no data, or is nothing that
            safetensors can hold.
        RankError: another rank failed, is gone or exports something else; nothing was written.
        WriteError: the disk is full, the path cannot be written, or the folder has an index of
            another name, which readers would still follow.
    """
    check_module(module, path)
    with together(module) as group:
        return _export(module, os.fsdecode(path), mapping, dtype, max_shard_bytes, group)


def _export(
    module: nn.Module,
    path: str,
    mapping: str | Mapper,
    dtype: torch.dtype | str | None,
    max_shard_bytes: int | None,
    group: Together | None,
) -> ExportReport:
    start_s = time.perf_counter()
    options = settings_from({"dtype": dtype})
    max_shard_bytes = bound_of_shards(max_shard_bytes)
    targets = targets_of(module)
    is_theirs = mapping == "auto" and is_model(module)
    name_map = None if is_theirs else _backwards(mapping, module, targets)
    tensors = {
        name: tensor
        for group in (module.named_parameters, module.named_buffers)
        for name, tensor in group(remove_duplicate=False)
        if not tensor.is_meta
    }
    parts = {n: t for n, t in tensors.items() if is_wrapper(t) and is_dtensor(t)}
    wrappers = [n for n, t in tensors.items() if n not in parts and is_wrapper(t)]
    if wrappers:
        kinds = listed(sorted({type(tensors[name]).__name__ for name in wrappers}))
        raise PlanError(
            f"{listed(map(repr, wrappers))}: a tensor subclass that holds its values in other "
            f"tensors ({kinds}) cannot be exported; export before it is quantised"
        )
    states, left_out = exported(module)
    if states and name_map is not None:
        placed = name_map.target_names()
        left_out += [key for key in states if key not in placed]
        states = {key: state for key, state in states.items() if key in placed}
    # Where ranks hold parts, the plan is made as if these were whole.
    wholes = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in parts.items()}
    path_of_module = f"<{type(module).__name__}>"
    source = MemorySource({**tensors, **wholes, **states}, path=path_of_module)
    stored, given = source.catalog.tensors, source.path
    if is_theirs:
        plan = plan_their_export(module, stored, targets, options, source=given)
    else:
        plan = build_export_plan(stored, name_map, targets, options, source=given)
    if states and name_map is None:
        specs = [TargetSpec((n,), tuple(t.shape), "", is_meta=False) for n, t in states.items()]
        # They are no weights: a dtype is not for them.
        own = build_export_plan(stored, None, Targets(tuple(specs)), settings_from({}))
        plan = replace(plan, tensors=(*plan.tensors, *own.tensors))
    plan = only_writable(plan)
    plan.raise_if_refused()
    config = _config_dict(module)
    extras = {"config.json": config_text(config, plan)} if config else {}
    with PeakSampler() as sampler:
        if parts:
            held = Parts(plan, source, tensors | states, group)
            report = write_parts(plan, source, path, held, group, extras, max_shard_bytes)
        else:
            report = write_checkpoint(
                plan, source, path, extras=extras, max_shard_bytes=max_shard_bytes
            )
    return replace(
        report,
        names="published" if is_theirs or name_map is not None else "local",
        notices=(*report.notices, *_left_out(left_out)),
        elapsed_s=time.perf_counter() - start_s,
        memory=peak_memory(sampler),
    )


def _backwards(mapping: str | Mapper, module: nn.Module, targets: Targets) -> NameMap | None:
    """The table to walk backwards, or None for the module's own names."""
    if isinstance(mapping, str):
        if mapping != "auto":
            raise ValueError(
                f"mapping must be 'auto' or a map, not {mapping!r}; streamload.mapping_for("
                "model_type, config) gives the table of an architecture"
            )
        return _published_map(module, targets)
    if isinstance(mapping, Mapping):
        return NameMap(tuple(Rule(stored, local) for stored, local in mapping.items() if local))
    if not isinstance(mapping, NameMap):
        raise TypeError("export cannot walk a function backwards: pass a NameMap or a dict")
    if mapping.layers is None:
        return replace(mapping, layers=_layer_count(targets))
    return mapping


def _left_out(keys: list[str]) -> list[str]:
    if not keys:
        return []
    return [
        f"extra states left out, since they are no plain tensors or have no name to be written "
        f"under: {listed(map(repr, keys))}"
    ]


def _layer_count(targets: Targets) -> int:
    found = [layer for name in targets if (layer := layer_of(name)) is not None]
    return max(found, default=-1) + 1


def _published_map(module: nn.Module, targets: Targets) -> NameMap | None:
    config = _config_dict(module)
    model_type = config.get("model_type")
    if isinstance(module, Decoder) and model_type in known_model_types():
        return mapping_for(model_type, config)
    if "pos_embed.weight" in targets and "blocks.0.attn.qkv.weight" in targets:
        tied = len(targets["tok_embed.weight"].names) > 1
        return gpt2_map({"n_layer": _layer_count(targets), "tie_word_embeddings": tied})
    return None


def _own_class(module: nn.Module) -> type:
    """The class that a module was built of; FSDP puts one of its own in front."""
    kind = type(module)
    while kind.__bases__[0].__name__ == "FSDPModule" and len(kind.__bases__) == 2:
        kind = kind.__bases__[1]
    return kind


def _config_dict(module: nn.Module) -> dict[str, Any]:
    """What ``config.json`` is to say: what the model was loaded from, or its own configuration."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    own = to_dict() if callable(to_dict) else {}
    if is_model(module):
        own["architectures"] = [_own_class(module).__name__]
        own.pop("distributed_config", None)  # how it lies here is nothing of the weights
    return {**own, **getattr(module, "published_config", {})}
