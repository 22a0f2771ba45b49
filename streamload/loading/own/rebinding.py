"""A binding as the rehearsal of a module's own code takes it, and as it leaves it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from streamload.core.dtypes import BY_NAME
from streamload.core.specs import TensorSpec
from streamload.mapping.binding import Assignment, Binding
from streamload.mapping.common import layer_of
from streamload.mapping.rules import KNOWN_WRAPPERS, strip_wrappers
from streamload.mapping.transforms import Identity
from streamload.module.own_loading.rehearsal import Rehearsal
from streamload.planning.records import Targets, TargetSpec
from streamload.sources.base import Source
from streamload.sources.blocks import torch_dtype


def place_of(module: nn.Module, name: str) -> str:
    """Under which name of the module torch would look for a stored one."""
    bare = strip_wrappers(name, KNOWN_WRAPPERS)
    wrapped = [f"{wrapper}.{bare}" for wrapper in KNOWN_WRAPPERS if wrapper in module._modules]
    for candidate in (name, bare, *wrapped):
        if candidate.partition(".")[0] in module._modules:
            return candidate
    return name


def versions_of(
    source: Source,
    stored: Mapping[str, TensorSpec],
    places: Mapping[str, str],
    binding: Binding,
) -> dict[str, Mapping[str, Any]]:
    """What the state dict notes of each module, by the module's path.

    Which stored path is which module's is known from the tensors that go there.
    """
    if not source.versions:
        return {}
    pairs = [(name, place) for place, name in places.items()]
    pairs += [(a.sources[0], a.targets[0]) for a in binding.assignments if len(a.targets) == 1]
    found: dict[str, str] = {}
    for name, own in pairs:
        path = stored[name].name
        while own and path and own.rpartition(".")[2] == path.rpartition(".")[2]:
            path, own = path.rpartition(".")[0], own.rpartition(".")[0]
            found.setdefault(own, path)
    noted = {own: source.versions.get(path) for own, path in found.items()}
    return {**source.versions, **{own: of for own, of in noted.items() if of is not None}}


def stand_ins(
    binding: Binding,
    places: Mapping[str, str],
    stored: Mapping[str, TensorSpec],
    targets: Targets,
) -> dict[str, torch.Tensor]:
    """A stand-in for each tensor that is stored, by the name its module would find it under."""
    found: dict[str, TensorSpec | TargetSpec] = {p: stored[name] for p, name in places.items()}
    for assignment in binding.assignments:
        is_plain = len(assignment.sources) == 1 and isinstance(assignment.transform, Identity)
        for target in assignment.targets:
            spec = stored[assignment.sources[0]] if is_plain else targets.by_name.get(target)
            if spec is not None:
                found[target] = spec
    return {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        for name, spec in found.items()
        if BY_NAME[spec.dtype].torch_name is not None  # planning refuses the others
    }


def renamed(binding: Binding, places: Mapping[str, str], rehearsal: Rehearsal) -> Binding:
    """The binding with every entry where the modules' code put it."""
    now: dict[str, list[str]] = {}
    for target, entry in rehearsal.sources.items():
        now.setdefault(entry, []).append(target)
    assignments: list[Assignment] = []
    ignored = list(binding.ignored)
    for assignment in binding.assignments:
        if rehearsal.dropped.issuperset(assignment.targets):
            ignored += assignment.sources
            continue
        first = tuple(now.get(target, [target])[0] for target in assignment.targets)
        assignments.append(replace(assignment, targets=first))
        if len(first) == 1:
            more = now.get(assignment.targets[0], [])[1:]
            assignments += [replace(assignment, targets=(target,)) for target in more]
    unexpected = []
    for place, name in places.items():
        assignments += [
            Assignment((name,), (target,), layer=layer_of(target)) for target in now.get(place, ())
        ]
        if place in rehearsal.dropped:
            ignored.append(name)
        elif place not in now:
            unexpected.append(name)
    return replace(
        binding,
        assignments=tuple(assignments),
        ignored=tuple(ignored),
        unexpected=tuple(unexpected),
    )


def without(binding: Binding, names: Iterable[str]) -> Binding:
    gone = set(names)
    left = tuple(name for name in binding.unexpected if name not in gone)
    return replace(binding, unexpected=left, ignored=(*binding.ignored, *gone))
