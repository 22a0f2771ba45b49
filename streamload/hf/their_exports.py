"""A transformers model back to its published names, by the library's own reversed conversions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import StreamloadError
from streamload.core.options import Settings
from streamload.core.specs import TensorSpec, contiguous_strides, numel
from streamload.hf.library import Model, reverted, unsaved
from streamload.hf.their_models import empty_model
from streamload.hf.their_names import bind_theirs
from streamload.hf.tracing import NoPlaceError, Traced
from streamload.mapping.fields import quantisation
from streamload.mapping.layout import Layout
from streamload.planning.build import build_plan
from streamload.planning.composing import compose
from streamload.planning.records import Plan, PlannedTensor, Targets, TargetSpec
from streamload.sources.base import Source
from streamload.sources.hub import folder_of


def plan_their_export(
    model: Model,
    stored: Mapping[str, TensorSpec],
    targets: Targets,
    options: Settings,
    *,
    source: str,
) -> Plan:
    """Plan an export of a model of the library; the arguments are those of ``build_export_plan``.

    Returns:
        A plan whose problems say what has no way back.
    """
    left_out = unsaved(model, targets)
    names: list[str] = []
    problems: list[str] = []
    for spec in targets.specs:
        if not spec.persistent or left_out.issuperset(spec.names):
            continue
        if spec.is_meta:
            problems.append(f"{spec.names[0]!r} is on the meta device: it has no values to export")
            continue
        # Of tied names, the library keeps the one that the others are tied to.
        names.append(next((n for n in spec.names if n not in left_out), spec.names[0]))
    wholes = {
        name: Traced(
            Layout.whole(at, stored[name].shape, stored[name].strides),
            getattr(torch, BY_NAME[stored[name].dtype].torch_name or "float32"),
        )
        for at, name in enumerate(names)
    }
    try:
        made = {} if problems else reverted(model, wholes)
    except NoPlaceError as error:
        made, problems = {}, [f"a conversion of transformers has no way back: {error}"]
    except Exception as error:  # whatever the library's code does with such a model
        made, problems = {}, [f"transformers cannot go back to published names: {error}"]
    plan = Plan((), (), options, stored, source, model.config.model_type)
    if problems:
        return plan.refused(*problems)
    tensors = []
    for name, traced in made.items():
        layout = traced.layout_of
        used = tuple(names[at] for at in sorted({piece.source for piece in layout.pieces}))
        dtypes = dict.fromkeys(stored[n].dtype for n in used)
        found = BY_NAME[next(iter(dtypes), "F32")]
        is_cast = options.dtype is not None and found.is_floating
        tensors.append(
            PlannedTensor(
                name=name,
                aliases=(),
                sources=used,
                shape=layout.shape,
                strides=contiguous_strides(layout.shape),
                dtype=(options.dtype if options.dtype and is_cast else found).name,
                stored_dtype="+".join(dtypes),
                copies=layout.copies(names) if numel(layout.shape) else (),
            )
        )
    dtype = options.dtype.torch_name if options.dtype else None
    return Plan(tuple(tensors), (), options, stored, source, model.config.model_type, dtype)


def plan_their_conversion(
    source: Source, config: Mapping[str, Any], options: Settings
) -> Plan | None:
    """Plan how a file with the names of the library's module goes back to published ones.

    Args:
        source: the open checkpoint.
        config: as in ``config.json``.
        options: ``dtype`` and the sizes of blocks are used.

    Returns:
        None if the file has published names already, or is none of the library's.
    """
    if quantisation(config):
        return None
    try:
        whole = empty_model(config, source.catalog, None, folder=folder_of(source.path), path="")
    except StreamloadError:
        return None
    bound = bind_theirs(whole.names, source.catalog)
    strange = bound.binding.unexpected or bound.binding.problems or bound.computed
    if strange or any(c.was_used() for c in whole.names.conversions):
        return None
    plain = replace(options, dtype=None)
    local = build_plan(source.catalog, None, None, plain, source=source.path, binding=bound.binding)
    specs = [TargetSpec((t.name,), t.shape, t.dtype, is_meta=False) for t in local.tensors]
    stored = {s.names[0]: TensorSpec(s.names[0], s.dtype, s.shape, source.path) for s in specs}
    targets = Targets(tuple(specs))
    back = plan_their_export(whole.model, stored, targets, options, source=source.path)
    if {t.name for t in back.tensors} == set(source.catalog):
        return None
    first = {t.name: t for t in local.tensors}
    tensors, problems = compose(first, back.tensors, options.dtype)
    plan = replace(local, tensors=tuple(tensors), model_type=back.model_type, options=options)
    return plan.with_findings(*back.findings).refused(*problems)
