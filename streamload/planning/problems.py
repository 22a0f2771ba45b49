"""Turns what a plan lacks into lines that say what is wrong, where, and what is close."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from streamload.report import ShapeMismatch
from streamload.specs import TensorSpec

__all__ = ["explain", "fold", "listed"]

# Comparing every name with every other is quadratic: only the first few get a suggestion.
_SUGGESTED = 5
_COMPARED = 2000
_NAMED = 3
# A problem of one target, as ``place`` words it: "'stored name': 'target' reason".
_OF_ONE = re.compile(r"(?:.+?): (?P<target>'[^']+') (?P<reason>.+)", re.DOTALL)
_SCALES = ("_scale_inv", "_scale", ".scales", "_scales", ".scale")


def listed(values: Iterable[object], most: int = 8) -> str:
    """A short list; what is left out is counted."""
    items = list(values)
    shown = ", ".join(map(str, items[:most]))
    return f"{shown}, … ({len(items)} in all)" if len(items) > most else shown


def fold(problems: Sequence[str]) -> list[str]:
    """Problems for one line: what many targets have in common is said once, with a few names."""
    groups: dict[str, list[str]] = {}
    for problem in problems:
        match = _OF_ONE.fullmatch(problem)
        groups.setdefault(match["reason"] if match else problem, []).append(problem)
    folded = []
    for reason, members in groups.items():
        if len(members) == 1 or members[0] == reason:
            folded.append(members[0])
            continue
        matches = (_OF_ONE.fullmatch(member) for member in members[:_NAMED])
        names = ", ".join(match["target"] for match in matches if match)
        more = ", …" if len(members) > _NAMED else ""
        folded.append(f"each of {len(members)} tensors ({names}{more}) {reason}")
    return folded


def explain(
    found: Sequence[str],
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatches: Sequence[ShapeMismatch],
    unfilled: Sequence[str],
    strict: bool,
    *,
    loaded: int,
    stored: Mapping[str, TensorSpec],
    incomplete: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> tuple[list[str], list[str]]:
    """Problems that refuse the plan, and notices that do not.

    Not strict: missing, unexpected, shape mismatches, incomplete and unfilled are notices.
    Loading nothing at all is a problem in both.
    """
    lines: list[str] = [f"shape mismatch: {entry}" for entry in mismatches]
    lines += incomplete
    if missing:
        lines.append(f"missing ({len(missing)}): {_with_hints(missing, unexpected)}")
    if unexpected:
        lines.append(f"unexpected ({len(unexpected)}): {_with_hints(unexpected, missing)}")
    left = [name for name in unfilled if name not in set(missing)]
    left = [name for name in left if name not in {m.name for m in mismatches}]
    if left:
        lines.append(
            f"on meta and not in any file ({len(left)}): {listed(map(repr, left))}; build the "
            "module under streamload.empty_weights(), which keeps buffers real"
        )
    problems, notices = list(found), list(_scale_notices((*unexpected, *ignored), stored))
    (problems if strict else notices).extend(lines)
    if not loaded:
        cause = _why_nothing(problems, missing, unexpected, mismatches, stored)
        problems.append(f"nothing would be loaded: {cause}")
    return problems, notices


def _why_nothing(
    problems: Sequence[str],
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatches: Sequence[ShapeMismatch],
    stored: Mapping[str, TensorSpec],
) -> str:
    """The first cause in sight, unless ``problems`` have it already."""
    if not stored:
        return "no tensors are stored here"
    if mismatches:
        first = "" if problems else f"; the first: {mismatches[0]}"
        return f"names fit, shapes do not ({len(mismatches)}){first}"
    if not unexpected:
        return "what was chosen has no tensor that can be"
    if problems:
        return "no stored name fits the model"
    first = f"; the first: {_with_hints(unexpected[:1], missing)} has no place"
    wanted = f", {missing[0]!r} is wanted" if missing else ""
    return f"no stored name fits the model{first}{wanted}"


def _with_hints(names: Sequence[str], others: Sequence[str]) -> str:
    shown = []
    for at, name in enumerate(names[:8]):
        hint = ""
        if at < _SUGGESTED and len(others) <= _COMPARED:
            close = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
            hint = f" (close to {close[0]!r})" if close else ""
        shown.append(f"{name!r}{hint}")
    more = f", … and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(shown) + more


def _scale_notices(unexpected: Sequence[str], stored: Mapping[str, TensorSpec]) -> Iterable[str]:
    """An FP8 weight whose scale is not used must not pass as plain numbers."""
    for name in unexpected:
        for ending in _SCALES:
            weight = stored.get(name.removesuffix(ending)) if name.endswith(ending) else None
            if weight is not None and weight.dtype.startswith(("F8", "F6", "F4")):
                yield (
                    f"{weight.name!r} is {weight.dtype} and its scale {name!r} is not applied: "
                    "the values are off by that scale"
                )
