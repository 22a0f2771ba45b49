"""Modules that take part in their own loading: what their code makes of a job's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from streamload.core.findings import Finding
from streamload.core.specs import TensorSpec
from streamload.core.wording import listed
from streamload.loading.own.extra_states import objects_in, states_in
from streamload.loading.own.rebinding import place_of, renamed, stand_ins, versions_of, without
from streamload.mapping.binding import Binding, Mapper
from streamload.module.extra_state import EXTRA_STATE, OwnCode
from streamload.module.own_loading.rehearsal import (
    Rehearsal,
    allowed_by_hooks,
    has_own_load_state_dict,
    is_torchs_own,
    rehearse,
    takes_part,
)
from streamload.module.targets import Owners
from streamload.planning.records import Plan, Targets, TargetSpec
from streamload.sources.base import Source


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
    owners: Owners,
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
        owners: it and all modules in it, as ``walk`` gives them.
        source: the open checkpoint.
        stored: its tensors, as ``binding`` names them.
        mapper: what names were bound by.
        targets: the module's tensors and extra states.
        binding: of the stored names.
        prefix: that is taken off stored names.
    """
    keys = {spec.names[0] for spec in targets.specs if spec.kind == EXTRA_STATE}
    binding, states = states_in(stored, keys, binding)
    objects, unexpected = objects_in(source, prefix, mapper, keys, states)
    states |= objects
    if states:
        targets = Targets(tuple(spec for spec in targets.specs if spec.names[0] not in states))
    rehearsal = Rehearsal()
    participants = [owner for _path, owner in owners if takes_part(owner)]
    if participants and (
        not all(map(is_torchs_own, participants))
        or binding.unexpected
        or _missing(targets, binding)
    ):
        places = {place_of(module, name): name for name in binding.unexpected}
        entries = stand_ins(binding, places, stored, targets)
        rehearsal = rehearse(module, entries, versions_of(source, stored, places, binding))
        binding = renamed(binding, places, rehearsal)
    if has_own_load_state_dict(module):
        rehearsal.refuse(module, "", "has a load_state_dict() of its own")
    settled = rehearsal.kept | rehearsal.made.keys()
    if any(owner._load_state_dict_post_hooks for _path, owner in owners):
        missing = [name for name in _missing(targets, binding) if name not in settled]
        if missing or binding.unexpected:
            allowed, unneeded = allowed_by_hooks(module, missing, binding.unexpected)
            settled |= allowed
            binding = without(binding, unneeded)
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
