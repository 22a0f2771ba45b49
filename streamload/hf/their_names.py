"""Stored names bound to a transformers model by the library's own renames and conversions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamload.core.specs import TensorSpec
from streamload.hf.library import Names, operations, unspoken
from streamload.hf.tracing import NoPlaceError, Places, Traced
from streamload.mapping.binding import Assignment, Binding
from streamload.mapping.common import KNOWN_BUFFERS, layer_of
from streamload.mapping.layout import Layout
from streamload.mapping.transforms import UNSTATED, Transform

# What reports call the library's operations; others go by their own names.
_WORDS = {
    "MergeModulelist": "stack",
    "SplitModulelist": "unstack",
    "Concatenate": "concat",
    "Chunk": "split",
    "PermuteForRope": "interleaved",
}


@dataclass
class _Group:
    """Stored tensors that a conversion takes together; patterns and names, in its order."""

    converter: Any
    parts: list[tuple[str, str]] = field(default_factory=list)


def bind_theirs(names: Names, stored: Mapping[str, TensorSpec]) -> Binding:
    """What ``from_pretrained`` would do with each stored name, as assignments.

    Args:
        names: the model's table.
        stored: seen name (prefix taken off) → the stored tensor's spec.
    """
    homeless: dict[str, str] = {}
    groups: dict[str, _Group] = {}
    assignments: list[Assignment] = []
    for name in names.in_their_order(stored):
        target, pattern = names.renamed(name)
        if not names.has(target):
            homeless[name] = target
        elif pattern is None:
            assignments.append(Assignment((name,), (target,), layer=layer_of(target)))
        else:
            group = groups.setdefault(target, _Group(names.converter(pattern)))
            group.parts.append((pattern, name))
    problems: list[str] = []
    for target, group in groups.items():
        made = _converted(names, target, group, stored)
        if isinstance(made, str):
            problems.append(made)
        else:
            assignments.append(made)
    _, quiet = unspoken(names.model, unexpected=homeless.values())
    ignored = [
        name
        for name, target in homeless.items()
        if target in quiet or KNOWN_BUFFERS.find(name, len(stored[name].shape))
    ]
    unexpected = [name for name in homeless if name not in set(ignored)]
    order = {name: at for at, name in enumerate(stored)}
    assignments.sort(key=lambda a: min(order[name] for name in a.sources))
    return Binding(tuple(assignments), tuple(ignored), tuple(unexpected), tuple(problems))


def _converted(
    names: Names, target: str, group: _Group, stored: Mapping[str, TensorSpec]
) -> Assignment | str:
    """The assignment of a conversion, or why there is none."""
    sources = tuple(name for _, name in group.parts)
    dtype = names.dtype_of(target)
    wholes = [
        Layout.whole(at, stored[name].shape, stored[name].strides)
        for at, name in enumerate(sources)
    ]
    parts = [
        (pattern, name, Traced(whole, dtype))
        for (pattern, name), whole in zip(group.parts, wholes, strict=True)
    ]
    words = "+".join(_WORDS.get(kind, kind.lower()) for kind in operations(group.converter))
    lead = f"{' + '.join(map(repr, sources[:4]))}{', …' if len(sources) > 4 else ''} → {target!r}"
    try:
        made = names.convert(group.converter, target, parts)
    except NoPlaceError as error:
        return f"{lead}: the conversion {words} is not understood ({error})"
    except Exception as error:  # whatever the library's code does with shapes that do not fit
        return f"{lead}: {words}: {error}"
    layouts = []
    for values in made.values():
        if not isinstance(values, Traced):
            return f"{lead}: the conversion {words} gives {type(values).__name__}"
        layouts.append(values.layout_of)
    transform: Transform = Places(tuple(layouts), words)
    if layouts == wholes:
        transform = UNSTATED
    return Assignment(sources, tuple(made), transform, layer_of(target))
