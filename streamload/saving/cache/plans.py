"""What the cache makes of a plan: whether it can serve it, its key, and the plan by an entry."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

from streamload.core.options import Settings
from streamload.core.specs import StridedCopy, contiguous_strides, numel
from streamload.core.wording import printable, without_secrets
from streamload.planning.needed_memory import needed_memory
from streamload.planning.records import MappedView, Plan, PlannedTensor
from streamload.saving.cache.facts import VERSION
from streamload.sources.base import Source


def why_not(plan: Plan, settings: Settings) -> str:
    """Why the cache cannot serve a load, or nothing."""
    if any(not t.is_new for t in plan.tensors):
        return "the module holds values, which are overwritten in place"
    if settings.layout == "stored":
        return "it keeps contiguous weights, and layout='stored' was asked for"
    if settings.on_layer is not None or settings.quantize is not None:
        return "blocks are changed while they are loaded (on_layer, quantize)"
    return ""


def made_with(settings: Settings) -> tuple[str, ...]:
    """What a user would want to know of how a copy was made, beside its dtype."""
    found = {
        "layers": "" if settings.layers is None else ",".join(map(str, sorted(settings.layers))),
        "prefix": settings.prefix or "",
        "adapter": ",".join(
            path if "://" in path else os.path.abspath(path) for path in settings.adapter
        ),
        "ties": "" if settings.ties == "refuse" else settings.ties,
        "replicas": "" if settings.replicas == "refuse" else settings.replicas,
    }
    texts = {name: printable(without_secrets(text)) for name, text in found.items() if text}
    return tuple(f"{name}={text}" for name, text in texts.items())


def plan_key(plan: Plan) -> str:
    """The same for plans that make the same values of the same files."""
    return digest(_ledger(plan))


def _ledger(plan: Plan) -> Iterator[str]:
    """Everything that decides the converted values, line by line."""
    options = plan.options
    yield f"{VERSION} {options.ties} {options.overflow} {options.replicas}"
    for t in sorted(plan.tensors, key=lambda tensor: tensor.name):
        sources = [plan.stored[name].name for name in t.sources]
        yield repr((t.name, t.shape, t.dtype, sources, t.stored_dtype, t.reduces, t.tolerance))
        yield repr([plan.stored[m.stored_name].name for m in t.copies])
        yield repr(t.copies)
        if ways := [e.key for name in t.sources if (e := plan.stored[name].encoding)]:
            yield repr(ways)
    for comparison in plan.comparisons:
        yield repr((comparison.kept.sources, comparison.other.sources))


def digest(lines: Iterable[str]) -> str:
    """SHA-256 of lines of text."""
    text = "".join(f"{line}\n" for line in lines)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def plan_from(plan: Plan, source: Source) -> Plan:
    """The same targets, each a view of the entry or copied from it to its device."""
    tensors = tuple(_from_entry(t) for t in plan.tensors)
    stored = source.catalog.tensors
    options = replace(plan.options, mode="map", layout="contiguous")
    memory = needed_memory(tensors, stored, options)
    return replace(
        plan, tensors=tensors, comparisons=(), options=options, stored=stored, memory=memory
    )


def _from_entry(tensor: PlannedTensor) -> PlannedTensor:
    count, strides = numel(tensor.shape), contiguous_strides(tensor.shape)
    is_view = tensor.device == "cpu" and count > 0
    return replace(
        tensor,
        sources=(tensor.name,),
        stored_dtype=tensor.dtype,
        strides=strides,
        copies=(StridedCopy(tensor.name, (count,), (1,), 0, (1,), 0),) if count else (),
        transform="",
        reduces="",
        mapped=MappedView(tensor.name, 0, strides) if is_view else None,
    )
