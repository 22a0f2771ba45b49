"""The library's conversions: places where they only re-lay, else run as the library does."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from streamload.core.dtypes import BY_NAME, BY_TORCH_NAME
from streamload.core.errors import CheckpointError
from streamload.core.specs import TensorSpec, numel
from streamload.hf.library import Names, operations
from streamload.hf.tracing import NoPlaceError, Places, Traced
from streamload.mapping.binding import Assignment
from streamload.mapping.common import layer_of
from streamload.mapping.layout import Layout
from streamload.mapping.transforms import UNSTATED, Transform
from streamload.sources.base import Source
from streamload.sources.wrapping.wrapping_source import WrappingSource

# What reports call the library's operations; others go by their own names.
_WORDS = {
    "MergeModulelist": "stack",
    "SplitModulelist": "unstack",
    "Concatenate": "concat",
    "Chunk": "split",
    "PermuteForRope": "interleaved",
}

# Operations that look at patterns and shapes alone, so that all layers are alike to them.
_BY_SHAPES = {*_WORDS, "Transpose", "Interleave"}


@dataclass(frozen=True)
class Conversion:
    """Stored tensors that the library puts together or cuts up to make some targets.

    Attributes:
        names: the model's table.
        converter: the library's.
        target: the first target's name.
        parts: pattern and seen name of each source, in the library's order.
    """

    names: Names
    converter: Any
    target: str
    parts: list[tuple[str, str]] = field(default_factory=list)

    @property
    def words(self) -> str:
        return "+".join(_WORDS.get(kind, kind.lower()) for kind in operations(self.converter))

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.parts)

    @property
    def lead(self) -> str:
        """What it is about, for messages."""
        some = " + ".join(map(repr, self.sources[:4]))
        return f"{some}{' + …' if len(self.parts) > 4 else ''} → {self.target!r}: {self.words}"

    def placed(
        self, stored: Mapping[str, TensorSpec], known: dict[object, Transform]
    ) -> Assignment:
        """The conversion as one assignment, whose transform says where each element goes.

        Args:
            stored: seen name → spec.
            known: what was made of the same shapes already, in another layer.

        Raises:
            NoPlaceError: it computes.
            Exception: whatever the library's code raises where shapes do not fit.
        """
        specs = [stored[name] for name in self.sources]
        wholes = [Layout.whole(at, s.shape, s.strides) for at, s in enumerate(specs)]
        own = self.names.own(self.target)
        patterns = tuple(pattern for pattern, _ in self.parts)
        shapes = tuple((spec.shape, spec.strides) for spec in specs)
        key = (id(self.converter), patterns, shapes, own.shape)
        if key in known:
            return Assignment(self.sources, (self.target,), known[key], layer_of(self.target))
        made = self.run([Traced(whole, own.dtype) for whole in wholes])
        layouts = []
        for values in made.values():
            if not isinstance(values, Traced):
                raise NoPlaceError(f"{type(values).__name__} comes out")
            layouts.append(values.layout_of)
        transform = UNSTATED if layouts == wholes else Places(tuple(layouts), self.words)
        if [*made] == [self.target] and _BY_SHAPES.issuperset(operations(self.converter)):
            known[key] = transform
        return Assignment(self.sources, tuple(made), transform, layer_of(self.target))

    def run(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What comes out for the sources' values, by target name."""
        parts = [(*part, value) for part, value in zip(self.parts, values, strict=True)]
        return self.names.convert(self.converter, self.target, parts)


@dataclass(frozen=True)
class Computed:
    """One target of a conversion that computes: a tensor that can only be had as a whole.

    Attributes:
        conversion: its sources are full stored names.
        target: which of its targets.
        spec: as a stored tensor's, under a name of its own.
        source_bytes: of the sources, cast as the library casts them.
    """

    conversion: Conversion
    target: str
    spec: TensorSpec
    source_bytes: int

    @property
    def transient_bytes(self) -> int:
        """What making it takes for a moment: sources, result, and as much again in between."""
        return self.source_bytes + 2 * self.spec.nbytes

    def values(self, source: Source) -> torch.Tensor:
        """Make it.

        Raises:
            CheckpointError: the library's code gave up, or gave something else than planned.
        """
        dtype = self.conversion.names.own(self.conversion.target).dtype
        read = [source.tensor(name).to(dtype) for name in self.conversion.sources]
        try:
            found = self.conversion.run(read)[self.target]
        except Exception as error:
            text = f"the conversion {self.conversion.words} failed: {error}"
            raise CheckpointError(text, path=self.spec.file, tensor=self.spec.name) from error
        if tuple(found.shape) != self.spec.shape:
            text = (
                f"{self.conversion.words} gives shape {list(found.shape)}, "
                f"not {list(self.spec.shape)}"
            )
            raise CheckpointError(text, path=self.spec.file, tensor=self.spec.name)
        own: torch.dtype = getattr(torch, BY_NAME[self.spec.dtype].torch_name or "")
        return found.detach().to(own).contiguous()


def computed_targets(
    conversion: Conversion, stored: Mapping[str, TensorSpec]
) -> dict[str, Computed]:
    """Every target of a conversion that computes, by the seen name it gets as a stored tensor."""
    specs = [stored[name] for name in conversion.sources]
    patterns = [pattern for pattern, _ in conversion.parts]
    names = [spec.name for spec in specs]
    whole = replace(conversion, parts=list(zip(patterns, names, strict=True)))
    found = {}
    for target in conversion.names.targets(conversion.converter, conversion.target):
        own = conversion.names.own(target)
        dtype = BY_TORCH_NAME[str(own.dtype).removeprefix("torch.")].name
        more = f" ({conversion.words} → {target})"
        spec = TensorSpec(names[0] + more, dtype, tuple(own.shape), specs[0].file)
        source_bytes = sum(numel(s.shape) for s in specs) * own.dtype.itemsize
        found[conversion.sources[0] + more] = Computed(whole, target, spec, source_bytes)
    return found


class ConvertingSource(WrappingSource):
    """A source, and beside its own tensors those that conversions compute, one at a time."""

    def __init__(self, inner: Source, computed: Mapping[str, Computed]) -> None:
        self._computed = {c.spec.name: c for c in computed.values()}
        super().__init__(inner, [c.spec for c in self._computed.values()])
        self._one_at_a_time = threading.Lock()

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._computed:
            return self.inner.tensor(name)
        with self._one_at_a_time:
            return self._computed[name].values(self.inner)
