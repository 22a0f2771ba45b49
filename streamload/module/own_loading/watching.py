"""What code that runs without values may do, and what it is seen to do, by torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from streamload.module.extra_state import Remembered
from streamload.module.torch_mode import TorchMode

# What may be asked of a stand-in, since it does not depend on values; and what keeps them.
_ASKED = {"__get__", "__len__", "dim", "element_size", "is_complex", "is_contiguous"}
_ASKED |= {"is_floating_point", "numel", "size", "storage_offset", "stride"}
_KEEPING = {"clone", "contiguous", "cpu", "detach", "requires_grad_"}


class Refused(Exception):  # noqa: N818  # never leaves this room
    """Something that must not even be tried."""


@contextmanager
def untouched(module: nn.Module) -> Iterator[Mapping[str, Remembered]]:
    """Whatever hooks do that reach the module itself, by a closure: it is as it was afterwards."""
    held: set[int] = set()
    for tensor in (*module.parameters(), *module.buffers()):
        with suppress(RuntimeError, NotImplementedError):  # of no plain memory
            held.add(tensor.untyped_storage().data_ptr())
    before = {path: Remembered(owner) for path, owner in module.named_modules()}
    try:
        with _Guard(held - {0}), torch.no_grad():
            yield before
    finally:
        for remembered in before.values():
            remembered.back()


class _Guard(TorchMode):
    """Lets nothing be written to memory that is held."""

    def __init__(self, held: Collection[int]) -> None:
        super().__init__()
        self._held = held

    def call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        first: Any = args[0] if args else None
        writes = _is_in_place(func) and isinstance(first, torch.Tensor) and not first.is_meta
        if writes and first.untyped_storage().data_ptr() in self._held:
            raise Refused("overwrites a tensor of the module by itself")
        return func(*args, **kwargs)


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    changes = ("__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
    return name in changes or (name.endswith("_") and not name.startswith("__"))


class Watch(TorchMode):
    """Sees which stand-ins are copied into which tensor, and which are computed with."""

    def __init__(self, names: Mapping[int, str], own: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._own = own
        self.copied: dict[str, torch.Tensor] = {}
        self.used: set[str] = set()
        self.changed: set[str] = set()

    def call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "copy_" and id(first) in self._own and len(args) > 1:
            self.copied[self._own[id(first)]] = args[1]
            return first
        seen = {self._names[id(t)] for t in tree_leaves((args, kwargs)) if id(t) in self._names}
        if seen and name in _KEEPING and isinstance(first, torch.Tensor):
            return first
        if name not in _ASKED:
            self.used |= seen
            if _is_in_place(func) and id(first) in self._own:
                self.changed.add(self._own[id(first)])
        return func(*args, **kwargs)
