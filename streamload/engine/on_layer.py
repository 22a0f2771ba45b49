"""``on_layer``: blocks are handed out as they become complete, and maybe replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from streamload.core.errors import StreamloadError
from streamload.engine.groups import Group
from streamload.planning.records import PlannedTensor
from streamload.sources.blocks import torch_dtype

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

        Args:
            group: a complete one.
            loaded: its tensors by target name.
            returned: what on_layer gave; None if there is no on_layer.

        Raises:
            StreamloadError: on_layer returned what has no place, or tensors of another shape,
                dtype or device than planned.
        """
        if returned is not None and not isinstance(returned, Mapping):
            raise StreamloadError(
                f"on_layer({group.layer}) must return None or a dict of replacements, not "
                f"{type(returned).__name__}"
            )
        planned = {n: t for t in group.tensors for n in (t.name, *t.aliases)}
        problems: list[str] = []
        for name, value in (returned or {}).items():
            if isinstance(value, nn.Module) and name not in planned:
                problems += _module_problems(name, value, group)
                self.modules[name] = value
            elif isinstance(value, torch.Tensor) and name in planned:
                first = planned[name].name
                if first in self.replaced and loaded[first] is not value:
                    problems.append(f"two tensors for {first!r} and {name!r}, which are one")
                loaded[first] = value
                self.replaced.add(first)
            else:
                what = "a tensor of this block" if name in planned else "a module to swap"
                problems.append(
                    f"{name!r}: {type(value).__name__}, which is not {what}: give a tensor for "
                    "one of the names it got, or a torch.nn.Module for a module's name"
                )
        if returned is not None:
            # All of them: those that it got may have been changed as well.
            problems += (p for t in group.tensors for p in _tensor_problems(loaded[t.name], t))
        if problems:
            raise StreamloadError(f"on_layer({group.layer}) returned {'; '.join(problems)}")
        swapped = tuple(f"{name}." for name in self.modules)
        for tensor in group.tensors:
            if not all(name.startswith(swapped) for name in (tensor.name, *tensor.aliases)):
                self.tensors[tensor.name] = loaded[tensor.name]


def _tensor_problems(tensor: torch.Tensor, planned: PlannedTensor) -> Iterator[str]:
    """What of a tensor is not as planned: nothing else may stand in the module, or be reported."""
    dtype = torch_dtype(planned.dtype)
    if not _is_on(tensor, planned.device):
        yield f"{planned.name!r} on device {tensor.device}, expected {planned.device}"
    if tensor.shape != planned.shape or tensor.dtype != dtype:
        yield (
            f"{planned.name!r} of shape {list(tensor.shape)} and {tensor.dtype}, expected "
            f"{list(planned.shape)} and {dtype}: to change that, give a module for the module's "
            "name"
        )


def _module_problems(name: str, module: nn.Module, group: Group) -> Iterator[str]:
    """Tensors of a module that hold nothing, or are elsewhere than what the module replaces."""
    devices = {t.device for t in group.tensors if t.name.startswith(f"{name}.")}
    for inner, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta or (devices and not any(_is_on(tensor, d) for d in devices)):
            expected = " or ".join(sorted(devices)) or "one with data"
            yield f"'{name}.{inner}' on device {tensor.device}, expected {expected}"


def _is_on(tensor: torch.Tensor, name: str) -> bool:
    """``cuda`` without a number is any of them."""
    found, device = tensor.device, torch.device(name)
    return found.type == device.type and device.index in (None, found.index)
