"""Modules that take part in their own loading: what their code makes of a job's names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from streamload.core.dtypes import BY_NAME
from streamload.core.findings import Finding
from streamload.core.specs import TensorSpec
from streamload.core.wording import listed
from streamload.mapping.binding import Assignment, Binding, Mapper
from streamload.mapping.common import layer_of
from streamload.mapping.rules import KNOWN_WRAPPERS, NameMap, strip_wrappers
from streamload.mapping.transforms import Identity
from streamload.module.extra_state import EXTRA_STATE, OwnCode
from streamload.module.own_loading import (
    Rehearsal,
    allowed_by_hooks,
    has_own_load_state_dict,
    is_torchs_own,
    rehearse,
    takes_part,
)
from streamload.module.targets import walk
from streamload.planning.records import Plan, Targets, TargetSpec
from streamload.sources.base import Source
from streamload.sources.blocks import torch_dtype


@dataclass(frozen=True)
class OwnPart:
    """What modules do beside taking tensors.

    Attributes:
        rehearsal: what their code makes of names.
        states: key of an extra state → the stored name, a tensor's or an object's.
        unexpected: extra states that are no tensors, and that no module takes.
        problems: what refuses the load.
    """

    rehearsal: Rehearsal = field(default_factory=Rehearsal)
    states: Mapping[str, str] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def read(self, source: Source) -> OwnCode:
        """What the commit applies, with the extra states read from the checkpoint."""
        states = {
            key: source.objects[name].value() if name in source.objects else source.tensor(name)
            for key, name in self.states.items()
        }
        return OwnCode(self.rehearsal.made, self.rehearsal.attributes, states)

    def told(self, plan: Plan) -> Plan:
        """The plan, with what refuses it and with what no module takes."""
        plan = replace(plan.refused(*self.problems), unexpected=plan.unexpected + self.unexpected)
        if not self.unexpected:
            return plan
        names = listed(map(repr, self.unexpected))
        text = f"unexpected ({len(self.unexpected)}): {names}: extra states that no module takes"
        return plan.with_findings(Finding(text, refuses=plan.options.strict))

    @property
    def notices(self) -> list[str]:
        """What a user should know of it."""
        texts = []
        if self.rehearsal.made:
            made = listed(map(repr, sorted(self.rehearsal.made)))
            texts.append(f"not from the file, set by the modules' own loading code: {made}")
        if self.states:
            keys = listed(map(repr, self.states))
            texts.append(f"extra state given to its modules: {keys}")
        return texts


def with_own_code(
    module: nn.Module,
    source: Source,
    stored: Mapping[str, TensorSpec],
    mapper: Mapper | None,
    targets: Targets,
    binding: Binding,
    prefix: str | None,
) -> tuple[Targets, Binding, OwnPart]:
    """The binding as the module's own code has it, the targets that are left, and the rest.

    Args:
        module: what is loaded into.
        source: the open checkpoint.
        stored: its tensors, as ``binding`` names them.
        mapper: what names were bound by.
        targets: the module's tensors and extra states.
        binding: of the stored names.
        prefix: that is taken off stored names.
    """
    keys = {spec.names[0] for spec in targets.specs if spec.kind == EXTRA_STATE}
    binding, states = _states(stored, keys, binding)
    objects, unexpected = _objects(source, prefix, mapper, keys, states)
    states |= objects
    if states:
        targets = Targets(tuple(spec for spec in targets.specs if spec.names[0] not in states))
    rehearsal = Rehearsal()
    owners = list({id(owner): owner for _path, owner in walk(module)}.values())
    participants = [owner for owner in owners if takes_part(owner)]
    if participants and (
        not all(map(is_torchs_own, participants))
        or binding.unexpected
        or _missing(targets, binding)
    ):
        places = {_place(module, name): name for name in binding.unexpected}
        entries = _entries(binding, places, stored, targets)
        rehearsal = rehearse(module, entries, _versions(source, stored, places, binding))
        binding = _renamed(binding, places, rehearsal)
    if has_own_load_state_dict(module):
        rehearsal.refuse(module, "", "has a load_state_dict() of its own")
    settled = rehearsal.kept | rehearsal.made.keys()
    if any(owner._load_state_dict_post_hooks for owner in owners):
        missing = [name for name in _missing(targets, binding) if name not in settled]
        if missing or binding.unexpected:
            allowed, unneeded = allowed_by_hooks(module, missing, binding.unexpected)
            settled |= allowed
            binding = _without(binding, unneeded)
    if settled:
        made = rehearsal.made.keys()
        targets = Targets(tuple(_settled(spec, settled, made) for spec in targets.specs))
    faults = (
        f"{name!r}, the extra state of {key!r}, {why}"
        for key, name in objects.items()
        if (why := source.objects[name].fault())
    )
    problems = (*faults, *rehearsal.problems)
    return targets, binding, OwnPart(rehearsal, states, unexpected, problems)


def _settled(spec: TargetSpec, settled: Iterable[str], made: Iterable[str]) -> TargetSpec:
    """A tensor that its module's code provides for: the file need not have it."""
    names = set(spec.names)
    if names.isdisjoint(settled):
        return spec
    is_meta = spec.is_meta and names.isdisjoint(made)
    return replace(spec, persistent=False, is_meta=is_meta)


def _missing(targets: Targets, binding: Binding) -> list[str]:
    filled = {name for a in binding.assignments for name in a.targets}
    return [
        spec.names[0] for spec in targets.specs if spec.persistent and filled.isdisjoint(spec.names)
    ]


def _place(module: nn.Module, name: str) -> str:
    """Under which name of the module torch would look for a stored one."""
    bare = strip_wrappers(name, KNOWN_WRAPPERS)
    wrapped = [f"{wrapper}.{bare}" for wrapper in KNOWN_WRAPPERS if wrapper in module._modules]
    for candidate in (name, bare, *wrapped):
        if candidate.partition(".")[0] in module._modules:
            return candidate
    return name


def _states(
    stored: Mapping[str, TensorSpec], keys: Collection[str], binding: Binding
) -> tuple[Binding, dict[str, str]]:
    """The binding without extra states that are tensors, and these: key → stored name."""
    if not keys:
        return binding, {}
    bare = {strip_wrappers(key, KNOWN_WRAPPERS): key for key in keys}
    states: dict[str, str] = {}
    unexpected: list[str] = []
    left: list[Assignment] = []
    for assignment in binding.assignments:
        if not any(target in keys for target in assignment.targets):
            left.append(assignment)
        elif states.setdefault(assignment.targets[0], assignment.sources[0]) not in (
            assignment.sources
        ):
            unexpected += assignment.sources
    states = {key: stored[name].name for key, name in states.items()}
    for name in binding.unexpected:
        # A table knows no extra states.
        key = bare.get(strip_wrappers(name, KNOWN_WRAPPERS))
        if key is None or states.setdefault(key, stored[name].name) != stored[name].name:
            unexpected.append(name)
    return replace(binding, assignments=tuple(left), unexpected=tuple(unexpected)), states


def _objects(
    source: Source,
    prefix: str | None,
    mapper: Mapper | None,
    keys: Collection[str],
    taken: Collection[str],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Extra states that are no tensors: key → stored name; and those that no module takes."""
    bare = {strip_wrappers(key, KNOWN_WRAPPERS): key for key in keys}
    states: dict[str, str] = {}
    unexpected = []
    start = f"{prefix.rstrip('.')}." if prefix else ""
    for name in source.objects:
        if not name.startswith(start):
            continue
        seen = name[len(start) :]
        own = seen if mapper is None or isinstance(mapper, NameMap) else _mapped(mapper, seen)
        key = own if own in keys else bare.get(strip_wrappers(own or "", KNOWN_WRAPPERS))
        if key is not None and key not in taken:
            states[key] = name
        elif own is not None:
            unexpected.append(name)
    return states, tuple(unexpected)


def _mapped(mapper: Mapper, name: str) -> str | None:
    if isinstance(mapper, Mapping):
        return mapper.get(name, "")
    assert callable(mapper), "a NameMap knows no extra states"
    return mapper(name)


def _versions(
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


def _entries(
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


def _renamed(binding: Binding, places: Mapping[str, str], rehearsal: Rehearsal) -> Binding:
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


def _without(binding: Binding, names: Iterable[str]) -> Binding:
    gone = set(names)
    left = tuple(name for name in binding.unexpected if name not in gone)
    return replace(binding, unexpected=left, ignored=(*binding.ignored, *gone))
