"""Which stored tensors and objects are the extra states of modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from streamload.core.specs import TensorSpec
from streamload.mapping.binding import Assignment, Binding, Mapper
from streamload.mapping.rules import KNOWN_WRAPPERS, NameMap, strip_wrappers
from streamload.sources.base import Source


def states_in(
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


def objects_in(
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
