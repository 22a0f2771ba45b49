"""``get_extra_state`` and ``set_extra_state``: what modules keep beside their tensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from streamload.core.errors import CheckpointError, PlanError
from streamload.module.targets import Owners, is_wrapper, walk
from streamload.planning.records import TargetSpec

KEY = _EXTRA_STATE_KEY_SUFFIX
EXTRA_STATE = "extra_state"  # the kind of such a target


def keyed(modules: Owners, method: str = "set_extra_state") -> list[tuple[str, nn.Module]]:
    """The keys of the modules that have an extra state of their own, and these modules."""
    plain = getattr(nn.Module, method)
    classes = {type(owner) for _path, owner in modules}
    having = {one for one in classes if getattr(one, method) is not plain}
    found = [(path, owner) for path, owner in modules if type(owner) in having] if having else []
    return [(f"{path}.{KEY}" if path else KEY, owner) for path, owner in found]


def extra_state_specs(modules: Owners) -> list[TargetSpec]:
    """The extra states as targets of names; they are never planned as tensors."""
    return [
        TargetSpec((key,), (), "U8", EXTRA_STATE, is_meta=False) for key, _owner in keyed(modules)
    ]


def exported(module: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Extra states that are plain tensors, by key; and the keys of those that are not.

    Raises:
        PlanError: a module's ``get_extra_state()`` fails.
    """
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    for key, owner in keyed(walk(module), "get_extra_state"):
        try:
            state: Any = owner.get_extra_state()
        except Exception as error:
            raise PlanError(
                f"{key!r}: get_extra_state() of {type(owner).__name__} raised {_said(error)}"
            ) from error
        if isinstance(state, torch.Tensor) and not (state.is_meta or is_wrapper(state)):
            tensors[key] = state
        else:
            others.append(key)
    return tensors, others


@dataclass(frozen=True)
class OwnCode:
    """What a load gives modules beside the tensors it streams; applied with the commit.

    Attributes:
        made: name of a tensor → its value, which the module's own loading code gives.
        attributes: (path of a module, attribute, plain value) that this code sets.
        states: key of an extra state → its value.
    """

    made: Mapping[str, torch.Tensor] = field(default_factory=dict)
    attributes: Sequence[tuple[str, str, object]] = ()
    states: Mapping[str, object] = field(default_factory=dict)

    def apply(self, module: nn.Module, undo: list[Callable[[], object]]) -> list[str]:
        """Set attributes and extra states; ``undo`` gets what takes each of them back.

        Returns:
            What a user should know.

        Raises:
            CheckpointError: a module does not take its extra state.
        """
        told = []
        for path, name, value in self.attributes:
            owner = module.get_submodule(path)
            undo.append(Remembered(owner).back)
            setattr(owner, name, value)
        for key, owner in keyed(walk(module)):
            if key not in self.states:
                continue
            state = self.states[key]
            undo.append(_remember_state(owner))
            try:
                owner.set_extra_state(state)
            except Exception as error:
                what = f"set_extra_state() of {type(owner).__name__}"
                # Transformer Engine writes files in memory, which others need not know.
                is_foreign = isinstance(error, AttributeError | TypeError)
                if not (is_foreign and isinstance(state, io.BytesIO)):
                    raise CheckpointError(f"{what} raised {_said(error)}", tensor=key) from error
                undo.pop()()
                told.append(
                    f"{key!r} is an io.BytesIO, which {what} does not take ({_said(error)}): the "
                    "module keeps the extra state it had"
                )
        return told


class Remembered:
    """A module's attributes as they are now, with the entries of those that are containers."""

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        self._held = dict(vars(owner))
        self._entries = {n: copy.copy(v) for n, v in self._held.items() if is_container(v)}

    def changed(self) -> list[str]:
        """The attributes that are others now, or hold other things."""
        now = vars(self._owner)
        return [name for name in {**self._held, **now} if self._is_changed(name, now)]

    def _is_changed(self, name: str, now: Mapping[str, Any]) -> bool:
        if name not in now or name not in self._held or now[name] is not self._held[name]:
            return True
        return name in self._entries and _seen(now[name]) != _seen(self._entries[name])

    def back(self) -> None:
        """Put the attributes back."""
        for name, entries in self._entries.items():
            container = self._held[name]
            container.clear()
            container.extend(entries) if isinstance(container, list) else container.update(entries)
        vars(self._owner).clear()
        vars(self._owner).update(self._held)


def is_container(value: object) -> bool:
    """True for the containers of Python itself, which can be copied and filled again."""
    own = type(value).__module__ in ("builtins", "collections")
    return own and isinstance(value, dict | list | set)


def _seen(container: Any) -> object:
    if isinstance(container, dict):
        return {key: id(value) for key, value in container.items()}
    return container if isinstance(container, set) else list(map(id, container))


def _remember_state(owner: nn.Module) -> Callable[[], None]:
    """What takes an extra state back, also where it is kept below the module's attributes."""
    attributes = Remembered(owner)
    before: object = _ABSENT
    with suppress(Exception):  # on meta, or of a module that only takes one
        before = copy.deepcopy(owner.get_extra_state())

    def back() -> None:
        if before is not _ABSENT:
            with suppress(Exception):
                owner.set_extra_state(before)
        attributes.back()

    return back


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_ABSENT = object()
