"""What would mend a plan: transposes that shapes give away, and a prefix that names lack.

A square matrix fits turned and unturned. Where the weights it belongs to fit one way only, one
that is taken the other way would be loaded without a sign of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from streamload.core.findings import Finding
from streamload.core.report import ShapeMismatch
from streamload.core.specs import Shape
from streamload.core.wording import listed
from streamload.mapping.binding import Mapper, bind, bind_equal
from streamload.mapping.templates import name_key
from streamload.planning.placing.builder import PlanBuilder
from streamload.planning.records import PlannedTensor

_SHOWN = 4
_DEEPEST = 6
# Names, and parts that they begin with, that are looked at for a second state dict.
_COMPARED, _MOST_HEADS = 20_000, 8


def is_turned(entry: ShapeMismatch) -> bool:
    """True if what is stored would fit transposed, and only so."""
    return _is_reversed(entry.stored_shape, entry.shape)


def square_findings(builder: PlanBuilder) -> list[Finding]:
    """A refusal for each kind of square matrix that goes another way than its siblings."""
    turned: dict[str, str] = {}  # family → a weight that fits only transposed
    by_table: dict[str, str] = {}  # family → a weight that the mapping transposes
    kept: dict[str, str] = {}  # family → a weight that fits only as it is stored
    for entry in builder.mismatches:
        evidence = turned if is_turned(entry) else kept
        if is_turned(entry) or (_is_matrix(entry.shape) and entry.stored_shape == entry.shape):
            for family in _families(entry.name):
                evidence.setdefault(family, entry.source)
    for tensor in builder.placed.values():
        if _transposes(tensor) and len(tensor.shape) == 2:
            for family in _families(tensor.name):
                # Embeddings stand beside the head at the top, and belong to nobody's family.
                if not family.startswith("|"):
                    by_table.setdefault(family, " + ".join(tensor.sources))
    wrong: dict[tuple[str, str], list[PlannedTensor]] = {}
    for tensor in builder.placed.values() if turned or by_table or kept else ():
        if not any(_is_square(builder.stored[name].shape) for name in tensor.sources):
            continue
        if _transposes(tensor):
            other, way = _first(kept, tensor), "transposed, but {} fits only as it is stored"
        else:
            other, way = _first(turned, tensor), "as it is, but {} fits only transposed"
            if other is None and tensor.name not in builder.stated:
                other, way = _first(by_table, tensor), "as it is, but {} is transposed"
        if other is not None:
            wrong.setdefault((name_key(tensor.name)[0], way.format(repr(other))), []).append(tensor)
    return [_finding(tensors, way) for (_, way), tensors in wrong.items()]


def mending_rules(builder: PlanBuilder) -> str:
    """The rules that would mend a plan all of whose mismatches are transposes, or nothing."""
    mismatches = builder.mismatches
    if not mismatches or not all(map(is_turned, mismatches)):
        return ""
    if any(_is_part(builder, entry) for entry in mismatches):
        return ""  # its rule has a transform already, which says how parts are joined
    rules = [_rule(entry.source, entry.name) for entry in mismatches]
    shown = listed(dict.fromkeys(rules), _SHOWN, more=", … ({total} rules in all)")
    return f"every mismatch is an exact transpose; a mapping=NameMap would mend it with {shown}"


def _is_part(builder: PlanBuilder, entry: ShapeMismatch) -> bool:
    """True if what is stored is but a part of its target."""
    spec = builder.targets.by_name.get(entry.name) if builder.targets else None
    return spec is not None and spec.shape != entry.shape


def _finding(tensors: Sequence[PlannedTensor], way: str) -> Finding:
    first = tensors[0]
    names = listed((repr(t.name) for t in tensors), 3)
    reason = f"{names}: square, and would be taken {way}"
    if "stack" not in first.transform:  # that of experts says how they are stacked, too
        rule = _rule(" + ".join(first.sources), first.name, is_turned=not _transposes(first))
        reason += f"; the rule that fits is {rule}"
    if "is transposed" in way:
        reason += ", or Identity() in its place if the square one is meant as it is"
    return Finding(reason, refuses=True)


def _rule(source: str, target: str, *, is_turned: bool = True) -> str:
    """A Rule in words; the block's number, if both names have it, is a placeholder."""
    numbers, others = name_key(source)[1], name_key(target)[1]
    if numbers and others and numbers[0] == others[0]:
        source, target = (_numbered(name, numbers[0]) for name in (source, target))
    names = tuple(source.split(" + "))
    shown = repr(names if len(names) > 1 else source)
    return f"Rule({shown}, {target!r}{', Transpose()' if is_turned else ''})"


def _numbered(name: str, number: str) -> str:
    parts = name.split(" + ")
    for at, part in enumerate(parts):
        pieces = part.split(".")
        if number in pieces:
            pieces[pieces.index(number)] = "{layer}"
        parts[at] = ".".join(pieces)
    return " + ".join(parts)


def _families(name: str) -> Iterator[str]:
    """What a weight's siblings have in common: the name but for numbers; the module around."""
    pattern = name_key(name, inside=True)[0]
    yield pattern
    *around, leaf = pattern.split(".")
    yield f"{'.'.join(around[:-1])}|{leaf}"


def _first(evidence: dict[str, str], tensor: PlannedTensor) -> str | None:
    return next((evidence[f] for f in _families(tensor.name) if f in evidence), None)


def _transposes(tensor: PlannedTensor) -> bool:
    return "transpose" in tensor.transform


def _is_matrix(shape: Shape) -> bool:
    return len(shape) == 2 and min(shape) > 1


def _is_square(shape: Shape) -> bool:
    return _is_matrix(shape) and shape[0] == shape[1]


def _is_reversed(stored: Shape, shape: Shape) -> bool:
    return _is_matrix(shape) and stored == shape[::-1] != shape


def explaining_prefix(builder: PlanBuilder, mapper: Mapper | None, missing: Sequence[str]) -> str:
    """What to do where all that is missing is stored under a prefix, or nothing."""
    if not missing or not builder.unexpected:
        return ""
    for prefix in _heads(builder.unexpected[0]):
        if _fills(builder, mapper, prefix, missing):
            depth = prefix.count(".") + 1
            heads = dict.fromkeys(
                ".".join(name.split(".")[:depth]) for name in builder.unexpected[:_COMPARED]
            )
            others = [head for head in islice(heads, _MOST_HEADS) if head != prefix]
            full = f"{builder.options.prefix.rstrip('.')}." if builder.options.prefix else ""
            every = [prefix, *(o for o in others if _fills(builder, mapper, o, missing))]
            ways = " or ".join(f'prefix="{full}{one}"' for one in every)
            one_of = "pass the one that is meant" if len(every) > 1 else "pass that"
            return f"everything missing is stored under {ways}: {one_of}"
    for prefix in _heads(missing[0]) if builder.targets is not None else ():
        start = f"{prefix}."
        names = {name[len(start) :] for name in missing if name.startswith(start)}
        if len(names) == len(missing) and names.issubset(builder.unexpected):
            return (
                f'only the module\'s names begin with prefix="{prefix}": load into its '
                f"{prefix!r}, or pass mapping=lambda name: '{start}' + name"
            )
    return ""


def _fills(
    builder: PlanBuilder, mapper: Mapper | None, prefix: str, missing: Sequence[str]
) -> bool:
    """True if everything missing is stored under a prefix."""
    start = f"{prefix}."
    under = {n[len(start) :]: s for n, s in builder.stored.items() if n.startswith(start)}
    binding = bind_equal(under, missing) if mapper is None else bind(mapper, under)
    return {t for a in binding.assignments for t in a.targets}.issuperset(missing)


def _heads(name: str) -> Iterator[str]:
    parts = name.split(".")
    for at in range(1, min(len(parts), _DEEPEST)):
        yield ".".join(parts[:at])
