"""Turns what a plan lacks into lines that say what is wrong, where, and what is close."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType

from streamload.core import wording
from streamload.core.dtypes import BY_NAME
from streamload.core.findings import Finding
from streamload.core.report import ShapeMismatch
from streamload.core.specs import TensorSpec
from streamload.core.wording import joined
from streamload.mapping.binding import Binding, Mapper
from streamload.mapping.rules import NameMap
from streamload.planning.mending import mending_rules
from streamload.planning.placing.builder import PlanBuilder

# Comparing every name with every other is quadratic: only the first few get a suggestion.
_SUGGESTED = 5
_WORDED = 2  # of these, how many say what the mapping makes of them
_COMPARED = 2000
_LONGEST = 256
_CUTS = 16
_SCALE = re.compile("scale|absmax|amax", re.IGNORECASE)


listed = partial(wording.listed, more=", … ({total} in all)")


def explain(
    builder: PlanBuilder,
    missing: Sequence[str],
    unexpected: Sequence[str],
    unfilled: Sequence[str],
    ignored: Sequence[str],
    prefix: str = "",
    fate: str = "",
    wanted: Mapping[str, str] = MappingProxyType({}),
) -> list[Finding]:
    """What the plan lacks, in lines that refuse it; if it is not strict, they are notices.

    Loading nothing at all is a problem in both. ``wanted``: see ``wanted_sources``.
    """
    stored = builder.stored
    sent = {stored[name].name: names for name, names in builder.nowhere.items()}
    goes = {
        name: (names[0], f"mapped to {joined(map(repr, names))}, which the module has not")
        for name, names in sent.items()
        if names[0] != name
    }
    takes = {
        name: (source, f"its rule wants {source!r}, which is not stored")
        for name, source in wanted.items()
    }
    mismatches = builder.mismatches
    lines = [Finding(prefix, refuses=not builder.placed)] if prefix else []
    lines += [Finding(f"shape mismatch: {entry}") for entry in mismatches]
    if rules := mending_rules(builder):
        lines.append(Finding(rules))
    lines += builder.incomplete
    if missing:
        lead = f"missing ({len(missing)}){f', {fate}' if fate else ''}"
        lines.append(Finding(f"{lead}: {_with_hints(missing, unexpected, takes)}"))
    if unexpected:
        hinted = _with_hints(sorted(unexpected, key=lambda n: n not in goes), missing, goes)
        lines.append(Finding(f"unexpected ({len(unexpected)}): {hinted}"))
    told = {*missing, *(entry.name for entry in mismatches), *builder.troubled}
    left = [name for name in unfilled if name not in told]
    if left:
        lines.append(
            Finding(
                f"on meta and not in any file ({len(left)}): {listed(map(repr, left))}; build the "
                "module under streamload.empty_weights(), which keeps buffers real"
            )
        )
    found = [*map(Finding, scale_notices((*unexpected, *ignored), builder.stored))]
    found += [replace(line, refuses=True) for line in lines] if builder.options.strict else lines
    if not builder.placed:
        has_problems = any(f.refuses for f in (*builder.findings, *found))
        cause = _why_nothing(has_problems, missing, unexpected, mismatches, builder.stored)
        if unexpected and not (builder.nowhere or mismatches or prefix):
            cause += "; mapping= of load_into says which name is which"
        found.append(Finding(f"nothing would be loaded: {cause}", refuses=True))
    return found


def _why_nothing(
    has_problems: bool,
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatches: Sequence[ShapeMismatch],
    stored: Mapping[str, TensorSpec],
) -> str:
    """The first cause in sight, unless a problem has it already."""
    if not stored:
        return "no tensors are stored here"
    if mismatches:
        first = "" if has_problems else f"; the first: {mismatches[0]}"
        return f"names fit, shapes do not ({len(mismatches)}){first}"
    if not unexpected:
        return "what was chosen has no tensor that can be"
    if has_problems:
        return "no stored name fits the model"
    first = f"; the first: {_with_hints(unexpected[:1], missing)} has no place"
    wanted = f", {missing[0]!r} is wanted" if missing else ""
    return f"no stored name fits the model{first}{wanted}"


def _with_hints(
    names: Sequence[str],
    others: Sequence[str],
    meant: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> str:
    """The first names; what is close among the others, or to what the mapping makes of them.

    ``meant``: the mapping's other name for a name, and words that say so.
    """
    shown = list(map(repr, names))
    others = [name for name in others if len(name) <= _LONGEST]
    for at, name in enumerate(names[:_SUGGESTED] if len(others) <= _COMPARED else ()):
        if len(name) > _LONGEST:
            continue
        other, words = meant.get(name, (name, ""))
        close = difflib.get_close_matches(other[:_LONGEST], others, n=1, cutoff=0.8)
        if words and at < _WORDED:
            shown[at] += f" ({words}{f'; close to {close[0]!r}' if close else ''})"
        elif name in close:
            shown[at] += " (in both, but the mapping leaves it out)"
        elif close:
            shown[at] += f" (close to {close[0]!r})"
    return wording.listed(shown, more=", … and {left} more")


def wanted_sources(
    mapper: Mapper | None,
    binding: Binding,
    stored: Collection[str],
    missing: Sequence[str],
) -> dict[str, str]:
    """Of the first missing targets, the stored name that the mapping looked for in vain."""
    names = set(missing[:_SUGGESTED])
    if not names or not isinstance(mapper, Mapping | NameMap):
        return {}
    names -= {name for assignment in binding.assignments for name in assignment.targets}
    if isinstance(mapper, NameMap):
        found = {name: source for name in names if (source := mapper.source_of(name))}
    else:
        found = {name: source for source, name in mapper.items() if name in names}
    return {name: source for name, source in found.items() if source not in stored}


def scale_notices(unused: Iterable[str], stored: Mapping[str, TensorSpec]) -> Iterable[str]:
    """FP8 weights whose scales are not used must not pass as plain numbers; one notice for all.

    Makers of such files call the scale as they like, so that any name is taken for one that
    speaks of a scale or a greatest value. It is the weight's whose name it begins with
    (``w.weight_scale``), else that of all weights of its module (``w.scale``).
    """
    scales = [name for name in unused if _SCALE.search(_leaf(name))]
    if not scales:
        return
    names = {spec.name: spec for spec in stored.values()}
    weights: dict[str, list[TensorSpec]] = {}
    pairs: list[tuple[TensorSpec, str]] = []
    for name, spec in names.items():
        if spec.dtype.startswith(("F8", "F6", "F4")) and not _SCALE.search(_leaf(name)):
            weights.setdefault(name.rpartition(".")[0], []).append(spec)
    for scale in scales:
        cuts = islice((at for at in range(len(scale) - 1, 0, -1) if scale[at] in "._"), _CUTS)
        owner = next((names[scale[:at]] for at in cuts if scale[:at] in names), None)
        beside = weights.get(scale.rpartition(".")[0], ())
        for weight in beside if owner is None else [owner]:
            if weight in weights.get(weight.name.rpartition(".")[0], ()):
                pairs.append((weight, scale))
    if pairs:
        weight, scale = pairs[0]
        others = wording.plural(len(pairs) - 1, "other weight")
        more = f", and so it is with {others}" if len(pairs) > 1 else ""
        yield (
            f"{weight.name!r} is {weight.dtype} and its scale {scale!r} is not applied: "
            f"the values are off by that scale{more}"
        )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def exact_notices(stored: Mapping[str, TensorSpec]) -> Iterable[str]:
    """What became of quantised tensors where nobody asked for a dtype."""
    exact = (s for s in stored.values() if s.encoding is not None and not s.encoding.made_dtype)
    counts = Counter((s.stored_dtype, s.dtype) for s in exact)
    for (old, new), count in counts.items():
        if old != new:
            what = f"{wording.plural(count, 'tensor')} of {old}"
            yield f"{what}, decoded to {BY_NAME[new].torch_name}, which is exact; dtype= casts"
