"""Which stored names fill which targets, by a table, a dict, a function or equal names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from streamload.core.quick_records import quickly_made
from streamload.core.specs import TensorSpec
from streamload.core.wording import joined, listed
from streamload.mapping.chaining import ByExpert
from streamload.mapping.common import KNOWN_BUFFERS, KNOWN_RENAMES, layer_of
from streamload.mapping.layout import LayoutError
from streamload.mapping.rules import KNOWN_WRAPPERS, NameMap, Rule, strip_wrappers
from streamload.mapping.templates import Template
from streamload.mapping.transforms import UNSTATED, Transform

Mapper: TypeAlias = NameMap | Mapping[str, str] | Callable[[str], str | None]
_BY_RULES = ": Rules go into NameMap(rules, layers=...)"
_WRAPPERS = (*KNOWN_WRAPPERS, "gpt_neox")


@quickly_made
@dataclass(frozen=True, slots=True)
class Assignment:
    """Stored names → target names.

    Attributes:
        absent: the rule's sources that were not found.
        by_rank: the sources are partitions of one tensor: one that is absent is damage.
        beyond: of stacked experts, the names that one more would have.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    transform: Transform = UNSTATED
    layer: int | None = None
    absent: tuple[str, ...] = ()
    by_rank: bool = False
    beyond: tuple[str, ...] = ()


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
        found = _bind_function(lambda name: table.get(name, ""), stored)
        if stored and table and table.keys().isdisjoint(stored):
            first, name = next(iter(table.items()))
            line = (
                f"no name in the mapping is stored, as {first!r} → {name!r}: it goes from stored "
                "names to the module's"
            )
            return replace(found, problems=(line,))
        return found
    if callable(mapper):
        return _bind_function(mapper, stored)
    raise TypeError(
        "mapping must be 'auto', a NameMap, a dict stored name → module name, or a function; "
        f"got {type(mapper).__name__}{_BY_RULES if isinstance(mapper, (list, tuple)) else ''}"
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

    def place_of(name: str) -> str | None:
        if name in targets:
            return name
        if not bare:
            for target in targets:
                bare.setdefault(strip_wrappers(target, wrappers), []).append(target)
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


# Which source of a rule, and its number of partition or expert → names that are there.
_Group: TypeAlias = "dict[tuple[int, int], list[str]]"
# A rule by its id, a layer, and an expert that has tensors of its own.
_Place: TypeAlias = "tuple[int, int | None, int | None]"

_MOST_EXPERTS = 10_000
_MOST_ABSENT = 100


def bind_table(name_map: NameMap, stored: Mapping[str, TensorSpec]) -> Binding:
    """Bind by a table; each stored name matches one rule or none, two are an error."""
    ignored: list[str] = []
    unexpected: list[str] = []
    problems: list[str] = []
    groups: dict[_Place, _Group] = {}
    used: set[int] = set()
    rules: dict[int, Rule] = {id(rule): rule for rule in name_map.rules}
    for name, spec in stored.items():
        matches = name_map.find(name, len(spec.shape))
        if len(matches) > 1:
            which = " and ".join(
                f"{rule.sources[at]!r} → {joined(map(repr, rule.targets)) or '(ignored)'}"
                for rule, at, _ in matches
            )
            problems.append(f"stored name {name!r} matches more than one rule: {which}")
            continue
        if not matches:
            unexpected.append(name)
            continue
        rule, at, values = matches[0]
        used.add(id(rule))
        if rule.ignores:
            ignored.append(name)
            continue
        expert, number = values.get("expert"), values.get("rank", 0)
        if rule.stacks:
            expert, number = None, expert or 0
        place = id(rule), values.get("layer"), expert
        group = groups.get(place)
        if group is None:
            groups[place] = {(at, number): [name]}
        else:
            group.setdefault((at, number), []).append(name)
    problems += _wildcards(rule for rule in name_map.rules if id(rule) not in used)
    numbered = {place: group for place, group in groups.items() if rules[place[0]].by_number}
    ranks = sorted({n for p, g in numbered.items() if rules[p[0]].by_rank for _, n in g}) or [0]
    experts = _experts_there_are(rules, numbered)
    assignments: list[Assignment] = []
    for (rule_id, layer, expert), group in groups.items():
        rule = rules[rule_id]
        numbers = range(experts[_home(rule), layer]) if rule.stacks else ranks
        found = _assignments(rule, layer, expert, group, numbers)
        if rule.unstacks:
            found, lines = _unstacked(rule, layer, found, stored)
            problems += lines
        assignments += found
    return Binding(tuple(assignments), tuple(ignored), tuple(unexpected), tuple(problems))


def _wildcards(unused: Iterable[Rule]) -> Iterable[str]:
    """A line for each rule that matched nothing and was written as for a shell, or as a regex."""
    for rule in unused:
        for source in rule.sources:
            if "*" in source or "\\" in source:
                yield (
                    f"no stored name is {source!r}, as a Rule says: {{layer}}, {{expert}} and "
                    "{rank} stand for numbers, and there are no other wildcards"
                )


def _home(rule: Rule) -> str:
    """What stands before the number of an expert: all that has it in common has as many."""
    return rule.sources[0].partition("{expert")[0]


def _experts_there_are(
    rules: Mapping[int, Rule], groups: Mapping[_Place, _Group]
) -> dict[tuple[str, int | None], int]:
    """How many experts a layer has by the names of all rules that stack them."""
    counts: dict[tuple[str, int | None], int] = {}
    for (rule_id, layer, _), group in groups.items():
        if rules[rule_id].stacks:
            home = _home(rules[rule_id]), layer
            counts[home] = max(counts.get(home, 0), 1 + max(number for _, number in group))
    return counts


def _assignments(
    rule: Rule, layer: int | None, expert: int | None, group: _Group, numbers: Sequence[int]
) -> list[Assignment]:
    """One assignment; more if wrappers made several names equal (planning refuses those).

    ``numbers`` are those of the partitions or experts that must all be there.
    """
    targets = () if rule.unstacks else names_of(rule.target_templates, layer, [expert])
    beyond = names_of(rule.source_templates, layer, [len(numbers)]) if rule.stacks else ()
    is_whole = not rule.by_number and len(group) == len(rule.sources)
    absent = () if is_whole else _absent(rule, layer, expert, group, numbers)
    by_place = [group[place] for place in sorted(group)]
    return [
        Assignment(
            tuple([names[min(copy, len(names) - 1)] for names in by_place]),
            targets,
            rule.whole,
            layer,
            absent,
            rule.by_rank,
            beyond,
        )
        for copy in range(max(map(len, by_place)))
    ]


def _absent(
    rule: Rule, layer: int | None, expert: int | None, group: _Group, numbers: Sequence[int]
) -> tuple[str, ...]:
    """The names that are not there, the first few of them.

    A sum or a mean over fewer partitions than there are would be wrong without a sign of it, and a
    stack with a gap would give experts the numbers of others.
    """
    lacking = (
        template.fill(layer=layer, expert=n if rule.stacks else expert, rank=n)
        for at, template in enumerate(rule.source_templates)
        for n in (numbers if rule.stacks or template.has("rank") else (0,))
        if (at, n) not in group
    )
    return tuple(islice(lacking, _MOST_ABSENT))


def names_of(
    templates: Sequence[Template], layer: int | None, experts: Iterable[int | None]
) -> tuple[str, ...]:
    """All experts of the first name, then those of the next one."""
    return tuple([t.fill(layer=layer, expert=expert) for t in templates for expert in experts])


def _unstacked(
    rule: Rule, layer: int | None, found: Sequence[Assignment], stored: Mapping[str, TensorSpec]
) -> tuple[list[Assignment], list[str]]:
    """The assignments with a target for each expert that is in the sources' shapes; problems."""
    made: list[Assignment] = []
    problems: list[str] = []
    for assignment in found:
        names = " + ".join(map(repr, assignment.sources))
        if assignment.absent:
            lacking = listed(map(repr, assignment.absent))
            problems.append(f"{names} cannot be unstacked: {lacking} is missing")
            continue
        try:
            assert isinstance(rule.whole, ByExpert)
            count = rule.whole.experts([stored[name].shape for name in assignment.sources])
        except LayoutError as error:
            problems.append(f"{names} cannot be unstacked: {error}")
            continue
        if not 0 < count <= _MOST_EXPERTS:
            problems.append(f"{names} cannot be unstacked: it has {count} experts")
            continue
        targets = names_of(rule.target_templates, layer, range(count))
        made.append(replace(assignment, targets=targets))
    return made, problems
