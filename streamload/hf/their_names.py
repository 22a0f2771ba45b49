"""Stored names bound to a transformers model by the library's own renames and conversions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from streamload.core.specs import Catalog, TensorSpec
from streamload.core.wording import listed
from streamload.hf.conversions import (
    Computed,
    Conversion,
    ConvertingSource,
    computed_targets,
)
from streamload.hf.library import Names, unspoken
from streamload.hf.tracing import NoPlaceError
from streamload.mapping.binding import Assignment, Binding
from streamload.mapping.choose import under_prefix
from streamload.mapping.common import KNOWN_BUFFERS, layer_of
from streamload.mapping.transforms import Transform
from streamload.sources.base import Source


@dataclass(frozen=True)
class TheirBinding:
    """What a model makes of a checkpoint's names.

    Attributes:
        binding: of the stored names.
        computed: tensors beside the stored ones that it binds, too: conversions that compute.
        beside: stored names that are ignored as they are of a class around this base model.
    """

    binding: Binding
    computed: Mapping[str, Computed] = field(default_factory=dict)
    beside: tuple[str, ...] = ()

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know of it."""
        if not self.beside:
            return ()
        names = listed(map(repr, self.beside))
        return (f"not of the base model that is built, left out ({len(self.beside)}): {names}",)

    def source(self, source: Source) -> Source:
        """The source, and beside its own tensors those that are computed."""
        return ConvertingSource(source, self.computed) if self.computed else source

    @property
    def transient_bytes(self) -> int:
        """What the largest of the conversions that compute needs for a moment."""
        return max((c.transient_bytes for c in self.computed.values()), default=0)


def bind_theirs(names: Names, stored: Mapping[str, TensorSpec]) -> TheirBinding:
    """What ``from_pretrained`` would do with each stored name, as assignments.

    Args:
        names: the model's table.
        stored: seen name (prefix taken off) → the stored tensor's spec.
    """
    homeless: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    assignments: list[Assignment] = []
    for name in names.in_their_order(stored):
        target, pattern = names.renamed(name)
        if not names.has(target):
            homeless[name] = target
        elif pattern is None:
            assignments.append(Assignment((name,), (target,), layer=layer_of(target)))
        else:
            own = Conversion(names, names.converter(pattern), target)
            conversions.setdefault(target, own).parts.append((pattern, name))
    known: dict[object, Transform] = {}
    problems: list[str] = []
    computed: dict[str, Computed] = {}
    order = {name: at for at, name in enumerate(stored)}
    for conversion in conversions.values():
        try:
            assignments.append(conversion.placed(stored, known))
        except NoPlaceError:
            made = computed_targets(conversion, stored)
            computed |= made
            order |= dict.fromkeys(made, order[conversion.sources[0]])
            assignments += [
                Assignment((name,), (c.target,), layer=layer_of(c.target))
                for name, c in made.items()
            ]
        except Exception as error:  # whatever the library's code does with such shapes
            problems.append(f"{conversion.lead}: {error}")
    _, quiet = unspoken(names.model, unexpected=homeless.values())
    ignored = {
        name
        for name, target in homeless.items()
        if target in quiet or KNOWN_BUFFERS.find(name, len(stored[name].shape))
    }
    # ``from_pretrained`` passes over whatever has no place; here that refuses, but for a head.
    around = homeless.items() if assignments else ()
    beside = tuple(n for n, t in around if n not in ignored and names.is_beside(t))
    ignored.update(beside)
    assignments.sort(key=lambda a: min(order[name] for name in a.sources))
    binding = Binding(
        tuple(assignments),
        tuple(name for name in homeless if name in ignored),
        tuple(name for name in homeless if name not in ignored),
        tuple(problems),
    )
    return TheirBinding(binding, computed, beside)


def bind_part(
    names: Names, catalog: Catalog, prefix: str | None, targets: Collection[str]
) -> TheirBinding:
    """A part of a model by the names and conversions of the whole.

    Args:
        names: the whole model's table.
        catalog: of the whole checkpoint.
        prefix: of the stored names that are for the part; taken off the sources.
        targets: the part's names.
    """
    seen = under_prefix(catalog, prefix)
    whole = bind_theirs(names, {spec.name: spec for spec in seen.values()})
    off = next((len(spec.name) - len(name) for name, spec in seen.items()), 0)
    heads = Counter(
        head
        for assignment in whole.binding.assignments
        for target in assignment.targets
        for head in _heads(target)
        if target[len(head) :] in targets
    )
    head = heads.most_common(1)[0][0] if heads else ""
    kept, lost = [], [name[off:] for name in whole.binding.unexpected]
    for a in whole.binding.assignments:
        sources = tuple(name[off:] for name in a.sources)
        if all(target.startswith(head) for target in a.targets):
            own = tuple(target[len(head) :] for target in a.targets)
            kept.append(replace(a, sources=sources, targets=own, layer=layer_of(own[0])))
        else:
            lost += sources
    ignored = tuple(name[off:] for name in whole.binding.ignored)
    binding = Binding(tuple(kept), ignored, tuple(lost), whole.binding.problems)
    return TheirBinding(binding, {name[off:]: c for name, c in whole.computed.items()})


def _heads(name: str) -> Iterator[str]:
    """Every beginning of a name that ends at a dot, the empty one first."""
    at = 0
    while at >= 0:
        yield name[:at]
        at = name.find(".", at) + 1 or -1
