"""What a quantisation method is given, and what it finds. No torch import."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streamload.core.specs import TensorSpec
from streamload.core.wording import printable
from streamload.decoding.quantized.grids import GridError

_QUOTED = re.compile(r"'([^']*)'")


@dataclass
class Found:
    """What of a checkpoint is quantised, collected by one method.

    Attributes:
        stored: the catalog.
        config: ``quantization_config`` of config.json.
        method: its ``quant_method``.
        field: where in config.json it says so.
        read: gives the bytes of a small tensor, for what only they say (shapes).
        values: name → the tensor of values, whose encoding says which stored ones make it.
        used: names of stored tensors that are nothing but parts of these.
        ignored: names of stored tensors that say nothing of weights.
        problems: what cannot be decoded, each with the tensor's name.
        is_known: there is a decoder for the method.
    """

    stored: Mapping[str, TensorSpec]
    config: Mapping[str, Any]
    method: str
    field: str = "quantization_config"
    read: Callable[[TensorSpec], bytes] | None = None
    values: dict[str, TensorSpec] = dataclasses.field(default_factory=dict)
    used: set[str] = dataclasses.field(default_factory=set)
    ignored: set[str] = dataclasses.field(default_factory=set)
    problems: list[str] = dataclasses.field(default_factory=list)
    is_known: bool = True

    def keep(self, spec: TensorSpec) -> None:
        """Add a tensor of values; what it is made of is used up."""
        assert spec.encoding is not None, "these are decoded"
        parts = set(_stored_parts(spec))
        if spec.name in self.values or (spec.name in self.stored and spec.name not in parts):
            self.problems.append(f"{spec.name!r} is stored twice, quantised in two ways or plain")
            return
        self.values[spec.name] = spec
        self.used.update(parts - {spec.name})

    def sibling(self, name: str, ending: str, other: str) -> TensorSpec:
        """The tensor whose name ends in ``other`` where ``name`` ends in ``ending``.

        Raises:
            GridError: there is none.
        """
        wanted = name.removesuffix(ending) + other
        if wanted not in self.stored:
            raise GridError(f"{name!r} needs {wanted!r}, which is not there")
        return self.stored[wanted]

    def refuse_leftovers(self, endings: tuple[str, ...]) -> None:
        """Parts of a weight of which others are missing, and are not told yet."""
        told = set(_QUOTED.findall(" ".join(self.problems)))
        known = self.used | self.values.keys() | told
        self.problems += [
            f"{name!r} lacks what belongs to it"
            for name in self.stored
            if name.endswith(endings) and name not in known
        ]

    def refusals(self) -> tuple[str, ...]:
        """The problems, the method first."""
        return tuple(f"{in_words(self)}: {text}" for text in self.problems)

    def is_wanted_by(self, names: Iterable[str]) -> bool:
        """True if a module with tensors of these names takes scales itself.

        Names may differ in what comes before a tensor's own module.
        """
        tails = {tail(name) for name in names}
        return bool(tails) and any(tail(name) in tails for name in self.used)


def _stored_parts(spec: TensorSpec) -> Iterator[str]:
    """The names of all that a tensor is made of, by way of whatever parts."""
    if spec.encoding is None:
        yield spec.name
    else:
        for part in spec.encoding.parts:
            yield from _stored_parts(part)


def tail(name: str) -> str:
    """What names of one tensor have in common, whatever stands before its own module."""
    return ".".join(name.split(".")[-2:])


def in_words(found: Found) -> str:
    """What the configuration says."""
    method = printable(found.method)[:80] or "of an unnamed method"
    return f"the weights are quantised: config.json has {found.field} ({method})"
