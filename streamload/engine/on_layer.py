"""``on_layer``: blocks are handed out as they become complete, and maybe replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from streamload.core.errors import StreamloadError
from streamload.engine.groups import Group

# on_layer(layer, tensors) → None, or tensor name → tensor and module name → module.
OnLayer: TypeAlias = Callable[[int | None, dict[str, torch.Tensor]], object]


@dataclass
class Replacements:
    """What became of the tensors of a load.

    Attributes:
        tensors: new ones by target name: those loaded and those given in their place.
        modules: by module name, to be swapped in; ``tensors`` lacks what is in these.
        replaced: names of the tensors that are not the loaded ones.
        overwritten: names of tensors overwritten in place, as far as it came.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    overwritten: list[str] = field(default_factory=list)

    def take(self, group: Group, loaded: dict[str, torch.Tensor], returned: object) -> None:
        """Enter what is kept and what came instead; the rest of ``loaded`` is let go.

        Raises:
            StreamloadError: on_layer returned what has no place.
        """
        first = {n: t.name for t in group.tensors for n in (t.name, *t.aliases)}
        if returned is not None and not isinstance(returned, Mapping):
            raise StreamloadError(
                f"on_layer({group.layer}) must return None or a dict of replacements, not "
                f"{type(returned).__name__}"
            )
        for name, value in (returned or {}).items():
            if isinstance(value, nn.Module) and name not in first:
                self.modules[name] = value
            elif isinstance(value, torch.Tensor) and name in first:
                loaded[first[name]] = value
                self.replaced.add(first[name])
            else:
                what = "a tensor of this block" if name in first else "a module to swap"
                kind = type(value).__name__
                raise StreamloadError(
                    f"on_layer({group.layer}) returned {name!r}: {kind}, which is not {what}: "
                    "give a tensor for one of the names it got, or a torch.nn.Module for a "
                    "module's name"
                )
        swapped = tuple(f"{name}." for name in self.modules)
        for tensor in group.tensors:
            if not all(name.startswith(swapped) for name in (tensor.name, *tensor.aliases)):
                self.tensors[tensor.name] = loaded[tensor.name]
