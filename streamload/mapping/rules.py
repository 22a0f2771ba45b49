"""``Rule`` and ``NameMap``: all knowledge of an architecture's names, as data, for both ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from streamload.core.display.cards import Card, Section, Shown
from streamload.core.wording import joined, plural
from streamload.mapping.chaining import ByExpert
from streamload.mapping.templates import Template, TemplateIndex
from streamload.mapping.transforms import UNSTATED, Transform, check_transform

# torch.compile (_orig_mod), DataParallel and DDP (module), and the classes that hold a base model.
# FSDP's and activation checkpointing's stand anywhere in a name, as torch.compile's.
_ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_DOTTED = tuple((part, f"{part}.") for part in _ANYWHERE)
KNOWN_WRAPPERS = ("module", *_ANYWHERE, "model", "transformer")

_SHOWN_RULES = 8


def _texts(value: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _by_expert(templates: tuple[Template, ...]) -> bool:
    return any(template.has("expert") for template in templates)


@dataclass(frozen=True, init=False)
class Rule:
    """Stored names → local names, by whole-segment templates.

    Attributes:
        sources: published names; several for a fused target.
        targets: local names; several for a split source; none if the source is ignored.
        transform: the re-layout between them; with ``{rank}`` in the source it gets all ranks,
            with ``{expert}`` in the sources or the targets alone all experts of a layer.
        ndim: the rule holds only for stored tensors of so many dimensions (a mask is known by
            its four).
        optional: an absent source is not missing (an alias, a bias some files leave out).

    Example:
        ``Rule(("q.weight", "k.weight", "v.weight"), "qkv.weight", Concat(0, (8, 8, 8)))``
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    transform: Transform
    ndim: int | None
    optional: bool

    def __init__(
        self,
        sources: str | tuple[str, ...] | list[str],
        targets: str | tuple[str, ...] | list[str] = (),
        transform: Transform | None = None,
        *,
        ndim: int | None = None,
        optional: bool = False,
    ) -> None:
        if transform is not None:
            check_transform(transform, "a Rule's transform")
        values = {
            "sources": _texts(sources),
            "targets": _texts(targets),
            "transform": transform or UNSTATED,
            "ndim": ndim,
            "optional": optional or not targets,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for text in (*self.sources, *self.targets):
            Template(text)  # raises ValueError on a malformed template
        if not self.sources:
            raise ValueError("a Rule needs at least one source")
        self._check_places()

    def _check_places(self) -> None:
        """Placeholders must be fillable both ways: bind fills targets, an export sources."""
        by_layer = [t.has("layer") for t in self.source_templates]
        for names, templates, place in (
            (f"sources {self.sources}", self.source_templates, "layer"),
            (f"sources {self.sources}", self.source_templates, "expert"),
            (f"targets {self.targets}", self.target_templates, "expert"),
        ):
            if len({template.has(place) for template in templates}) > 1:
                raise ValueError(f"{names}: {{{place}}} must be in all of them or in none")
        for target in self.target_templates:
            if target.has("rank"):
                raise ValueError(f"target {target.text!r}: {{rank}} may only stand in sources")
            if target.has("layer") and not by_layer[0]:
                raise ValueError(f"target {target.text!r} has {{layer}}, its sources have not")
        if (self.stacks or self.unstacks) and self.by_rank:
            raise ValueError(f"sources {self.sources}: {{rank}} and a stack of experts in one rule")
        try:
            assert self.whole
        except ValueError as error:
            raise ValueError(f"Rule {self.sources} to {self.targets}: {error}") from None

    @property
    def cells(self) -> tuple[str, str, str]:
        """Sources, targets and transform as people read them."""
        # One's own transform may have none.
        label = getattr(self.transform, "label", type(self.transform).__name__)
        label = f"[{label}]" if label else ""
        return joined(self.sources), f"→ {joined(self.targets) or '(ignored)'}", label

    @cached_property
    def ignores(self) -> bool:
        """True if what matches is not wanted."""
        return not self.targets

    @cached_property
    def source_templates(self) -> tuple[Template, ...]:
        return tuple(map(Template, self.sources))

    @cached_property
    def target_templates(self) -> tuple[Template, ...]:
        return tuple(map(Template, self.targets))

    @cached_property
    def by_rank(self) -> bool:
        """True if the source's partitions are merged."""
        return any(t.has("rank") for t in self.source_templates)

    @cached_property
    def by_number(self) -> bool:
        """True if a source is several stored tensors: a partition or an expert each."""
        return self.by_rank or self.stacks

    @cached_property
    def stacks(self) -> bool:
        """True if experts are apart in the sources and together in the targets."""
        return bool(self.targets) and _by_expert(self.source_templates) > _by_expert(
            self.target_templates
        )

    @cached_property
    def unstacks(self) -> bool:
        """True if experts are together in the sources and apart in the targets."""
        return _by_expert(self.target_templates) > _by_expert(self.source_templates)

    @cached_property
    def whole(self) -> Transform:
        """The transform, over all experts where it stacks them or cuts a stack."""
        if not (self.stacks or self.unstacks):
            return self.transform
        return ByExpert(self.transform, len(self.sources), len(self.targets), self.unstacks)

    @cached_property
    def by_layer(self) -> bool:
        """True if the rule stands for one tensor a layer."""
        return any(t.has("layer") for t in (*self.source_templates, *self.target_templates))


@dataclass(frozen=True, repr=False)
class NameMap(Shown):
    """A table of Rules for one architecture and configuration.

    Attributes:
        rules: no two may match the same name.
        layers: number of blocks, if known: what is expected of a file.
        ties: groups of local names that are one tensor.
        wrappers: leading name parts that are taken off stored names (and published templates)
            before matching; those of torch's own tools (``_orig_mod``) are taken off anywhere.
        model_type: as in ``config.json``.
    """

    rules: tuple[Rule, ...]
    layers: int | None = None
    ties: tuple[tuple[str, ...], ...] = ()
    wrappers: tuple[str, ...] = KNOWN_WRAPPERS
    model_type: str | None = None
    notices: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        rules = (self.rules,) if isinstance(self.rules, Rule) else tuple(self.rules)
        wrong = next((rule for rule in rules if not isinstance(rule, Rule)), None)
        if wrong is not None:
            raise TypeError(
                f"a NameMap is made of Rules, not of {wrong!r}; a dict of names is a mapping itself"
            )
        object.__setattr__(self, "rules", rules)

    def _card(self) -> Card:
        count = plural(len(self.rules), "rule")
        layers = "" if self.layers is None else f", {plural(self.layers, 'layer')}"
        rows = [rule.cells for rule in self.rules]
        body = [" ".join(filter(None, row)) for row in rows[:_SHOWN_RULES]]
        if len(rows) > _SHOWN_RULES:
            body.append(f"… and {len(rows) - _SHOWN_RULES} more in .rules")
        return Card(
            f"NameMap{f' of {self.model_type}' if self.model_type else ''}: {count}{layers}",
            facts=(("tied", ", ".join(map(" = ".join, self.ties))),) if self.ties else (),
            notices=self.notices,
            body=tuple(body),
            sections=(Section("rules", len(rows), lambda: rows),),
        )

    @cached_property
    def _sources(self) -> TemplateIndex[tuple[Rule, int]]:
        """The rules' sources without wrappers, and which of its rule each is."""
        index: TemplateIndex[tuple[Rule, int]] = TemplateIndex()
        for rule in self.rules:
            for at, template in enumerate(rule.source_templates):
                index.add(Template(strip_wrappers(template.text, self.wrappers)), (rule, at))
        return index

    def find(self, name: str, ndim: int) -> list[tuple[Rule, int, dict[str, int]]]:
        """Rules that match a stored name, which source of each, and the placeholders' values."""
        return [
            (rule, at, values)
            for (rule, at), values in self._sources.find(strip_wrappers(name, self.wrappers))
            if rule.ndim is None or rule.ndim == ndim
        ]

    def expand(self) -> Iterator[tuple[Rule, int | None]]:
        """Every rule with each of its layers; by-layer rules need ``layers``."""
        for rule in self.rules:
            if not rule.by_layer:
                yield rule, None
            else:
                for layer in range(self.layers or 0):
                    yield rule, layer

    def experts(self, local_names: Iterable[str]) -> dict[tuple[int, int | None], list[int]]:
        """Which experts a module with these names has apart, by the rule's ``id`` and layer."""
        index: TemplateIndex[int] = TemplateIndex()
        for rule in self.rules:
            for template in rule.target_templates:
                if template.has("expert"):
                    index.add(template, id(rule))
        found: dict[tuple[int, int | None], set[int]] = {}
        for name in local_names:
            for rule_id, values in index.find(name):
                found.setdefault((rule_id, values.get("layer")), set()).add(values["expert"])
        return {place: sorted(numbers) for place, numbers in found.items()}

    def source_of(self, local_name: str) -> str | None:
        """The first stored name of the first rule that fills a name, or None."""
        index: TemplateIndex[Template] = TemplateIndex()
        for rule in self.rules:
            for template in rule.target_templates:
                index.add(template, rule.source_templates[0])
        for template, values in index.find(local_name):
            numbers = {place: values.get(place, 0) for place in ("layer", "expert", "rank")}
            return template.fill(**numbers)
        return None

    def target_names(self) -> set[str]:
        """All local names the table can fill, but those of experts, whose number a file says."""
        return {
            template.fill(layer=layer)
            for rule, layer in self.expand()
            for template in rule.target_templates
            if not template.has("expert")
        }


def strip_wrappers(name: str, wrappers: tuple[str, ...]) -> str:
    """``name`` without leading wrappers, in any order and number.

    Those that torch's own tools put in the middle of a name (``_orig_mod``) go from anywhere.
    """
    for part, dotted in _DOTTED:
        if dotted in name and part in wrappers:
            name = ".".join(p for p in name.split(".") if p != part)
    while True:
        head, dot, rest = name.partition(".")
        if not dot or head not in wrappers:
            return name
        name = rest
