"""Which stored names fill which targets, by a table, a dict, a function or equal names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from streamload.core.specs import TensorSpec
from streamload.mapping.common import KNOWN_BUFFERS, KNOWN_RENAMES, layer_of
from streamload.mapping.rules import KNOWN_WRAPPERS, NameMap, Rule, strip_wrappers
from streamload.mapping.transforms import UNSTATED, Transform

Mapper: TypeAlias = "NameMap | Mapping[str, str] | Callable[[str], str | None]"
_WRAPPERS = (*KNOWN_WRAPPERS, "gpt_neox")


@dataclass(frozen=True, slots=True)
class Assignment:
    """Stored names → target names.

    Attributes:
        absent: the rule's sources that were not found.
        by_rank: the sources are partitions of one tensor: one that is absent is damage.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    transform: Transform = UNSTATED
    layer: int | None = None
    absent: tuple[str, ...] = ()
    by_rank: bool = False


@dataclass(frozen=True, slots=True)
class Binding:
    """All assignments, and what is left over."""

    assignments: tuple[Assignment, ...]
    ignored: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def bind(mapper: Mapper, stored: Mapping[str, TensorSpec]) -> Binding:
    """Bind by a NameMap, a dict, or a function of the stored name."""
    if isinstance(mapper, NameMap):
        return bind_table(mapper, stored)
    if isinstance(mapper, Mapping):
        table = dict(mapper)
        return _bind_function(lambda name: table.get(name, ""), stored)
    if callable(mapper):
        return _bind_function(mapper, stored)
    raise TypeError(
        "mapping must be 'auto', a NameMap, a dict stored name → module name, or a function; "
        f"got {type(mapper).__name__}"
    )


def bind_equal(
    stored: Mapping[str, TensorSpec], targets: Collection[str] | None, base: str = ""
) -> Binding:
    """Bind equal names; where a name does not fit, known wrappers are taken off both sides.

    ``base`` is one more of them: what the module calls the model inside of its heads.
    """
    wrappers = (*_WRAPPERS, base) if base else _WRAPPERS
    if targets is None:
        return Binding(tuple(Assignment((n,), (n,), layer=layer_of(n)) for n in stored))
    bare: dict[str, list[str]] = {}
    for target in targets:
        bare.setdefault(strip_wrappers(target, wrappers), []).append(target)

    def place_of(name: str) -> str | None:
        if name in targets:
            return name
        plain = strip_wrappers(name, wrappers)
        fits = bare.get(plain) or bare.get(KNOWN_RENAMES.get(plain, ""), [])
        if len(fits) == 1:
            return fits[0]
        return None if KNOWN_BUFFERS.find(name, len(stored[name].shape)) else "\0"

    return _bind_function(place_of, stored, nowhere="\0")  # a module's own name may be ""


def _bind_function(
    function: Callable[[str], str | None], stored: Collection[str], *, nowhere: str = ""
) -> Binding:
    """``None`` ignores a name, ``nowhere`` finds no place for it."""
    assignments: list[Assignment] = []
    ignored: list[str] = []
    unexpected: list[str] = []
    for name in stored:
        target = function(name)
        if target is not None and not isinstance(target, str):
            raise TypeError(
                f"the mapping gives {target!r} for {name!r}, expected a module name or None"
            )
        if target is None:
            ignored.append(name)
        elif target == nowhere:
            unexpected.append(name)
        else:
            assignments.append(Assignment((name,), (target,), layer=layer_of(target)))
    return Binding(tuple(assignments), tuple(ignored), tuple(unexpected))


_Group: TypeAlias = "dict[tuple[int, int], list[str]]"


def bind_table(name_map: NameMap, stored: Mapping[str, TensorSpec]) -> Binding:
    """Bind by a table; each stored name matches one rule or none, two are an error."""
    ignored: list[str] = []
    unexpected: list[str] = []
    problems: list[str] = []
    groups: dict[tuple[int, int | None], _Group] = {}
    rules: dict[int, Rule] = {id(rule): rule for rule in name_map.rules}
    for name, spec in stored.items():
        matches = name_map.find(name, len(spec.shape))
        if len(matches) > 1:
            which = " and ".join(repr(rule.sources[at]) for rule, at, _ in matches)
            problems.append(f"stored name {name!r} matches more than one rule: {which}")
        elif not matches:
            unexpected.append(name)
        elif matches[0][0].ignores:
            ignored.append(name)
        else:
            rule, at, values = matches[0]
            group = groups.setdefault((id(rule), values.get("layer")), {})
            group.setdefault((at, values.get("rank", 0)), []).append(name)
    ranks = sorted({rank for group in groups.values() for _, rank in group}) or [0]
    assignments = [
        assignment
        for (rule_id, layer), group in groups.items()
        for assignment in _assignments(rules[rule_id], layer, group, ranks)
    ]
    return Binding(tuple(assignments), tuple(ignored), tuple(unexpected), tuple(problems))


def _assignments(
    rule: Rule, layer: int | None, group: _Group, ranks: Sequence[int]
) -> list[Assignment]:
    """One assignment; more if wrappers made several names equal (planning refuses those)."""
    targets = tuple(template.fill(layer=layer) for template in rule.target_templates)
    places = sorted(group)
    # A sum or a mean over fewer partitions than there are would be wrong without a sign of it.
    absent = tuple(
        template.fill(layer=layer, rank=rank)
        for at, template in enumerate(rule.source_templates)
        for rank in (ranks if template.has("rank") else (0,))
        if (at, rank) not in group
    )
    repeats = max(len(names) for names in group.values())
    return [
        Assignment(
            tuple(group[place][min(copy, len(group[place]) - 1)] for place in places),
            targets,
            rule.transform,
            layer,
            absent,
            rule.by_rank,
        )
        for copy in range(repeats)
    ]
