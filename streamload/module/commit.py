"""The commit: a load's new tensors are put in their place at once, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from streamload.core.errors import PlanError, naming, note_overwritten
from streamload.engine.on_layer import Replacements
from streamload.module.extra_state import OwnCode
from streamload.module.own_loading.rehearsal import run_post_hooks
from streamload.module.sharded import around, is_dtensor
from streamload.module.targets import identity, is_wrapper, slots
from streamload.planning.devices import device_of
from streamload.planning.records import Plan

# on_assign(stored_name, module_name), before each assignment, from the caller's thread.
OnAssign: TypeAlias = Callable[[str, str], object]


@dataclass(slots=True)
class _Change:
    """One entry of a module's table that is to hold another tensor, or another module."""

    owner: nn.Module
    table: dict[str, Any]
    attribute: str
    name: str
    old: Any
    new: Any

    def put(self, value: Any) -> None:
        """Have the entry hold ``value``, the new one or the old one again."""
        self.table[self.attribute] = value
        if isinstance(self.owner, nn.RNNBase):
            # Recurrent layers keep a second list of their weights, which forward() uses.
            names = self.owner._flat_weights_names
            if self.attribute in names:
                self.owner._flat_weights[names.index(self.attribute)] = value


def commit(
    module: nn.Module,
    plan: Plan,
    loaded: Replacements,
    *,
    own: OwnCode | None = None,
    on_assign: OnAssign | None = None,
    confirm: Callable[[], object] | None = None,
) -> list[str]:
    """Put all new tensors in their place at once; on any exception the module is as it was.

    Kept: Parameter subclass and attributes, ``requires_grad``, ties, order, hooks. Real buffers
    that the file does not hold are moved to the plan's device and never cast.

    Args:
        module: the module the plan was made for.
        plan: what goes where.
        loaded: new tensors by target name, and modules that take the place of those of their
            names; of tensors that come from the caller their own class is kept.
        own: what the modules' own code and their extra states add.
        on_assign: called with (stored name, module name) before each assignment.
        confirm: called last; where it raises, everything is taken back.

    Returns:
        What a user should know of it.

    Raises:
        PlanError: a module of ``loaded`` has no place; nothing was changed.
    """
    own = own or OwnCode()
    changes = _changes(module, plan, loaded, own.made) + _swaps(module, loaded.modules)
    sources = {t.name: [plan.stored[s].name for s in t.sources] for t in plan.tensors}
    undo: list[Callable[[], object]] = []
    try:
        for change in changes:
            if on_assign is not None:
                for stored in sources.get(change.name, ()):
                    on_assign(stored, change.name)
            undo.append(partial(change.put, change.old))
            change.put(change.new)
        if on_assign is not None:
            for planned in plan.tensors:
                if not planned.is_new:
                    for stored in sources[planned.name]:
                        on_assign(stored, planned.name)
        with naming(plan.source):
            told = own.apply(module, undo)
        run_post_hooks(module, _IncompatibleKeys(list(plan.missing), list(plan.unexpected)))
        if confirm is not None:
            confirm()
    except BaseException as error:
        for back in reversed(undo):
            back()
        if loaded.overwritten:
            note_overwritten(error, loaded.overwritten)
        raise
    return told


def _swaps(module: nn.Module, modules: Mapping[str, nn.Module]) -> list[_Change]:
    """Every place where a named module stands, also under another name."""
    changes: list[_Change] = []
    paths = dict(module.named_modules(remove_duplicate=False))
    for name, new in modules.items():
        if not name or name not in paths:
            raise PlanError(f"on_layer returned a module for {name!r}, which the model has not")
        for path, owner in paths.items():
            changes += [
                _Change(owner, owner._modules, attribute, f"{path}.{attribute}", child, new)
                for attribute, child in owner._modules.items()
                if child is paths[name]
            ]
    return changes


class _Overwrite(_Change):
    """A tensor that holds data gets other values in the same memory."""

    def put(self, value: Any) -> None:
        with torch.no_grad():
            self.table[self.attribute].copy_(value)


def _changes(
    module: nn.Module, plan: Plan, loaded: Replacements, made: Mapping[str, torch.Tensor]
) -> list[_Change]:
    """Every place that gets a new tensor, and real buffers that move to another device."""
    first_name = {n: t.name for t in plan.tensors for n in (t.name, *t.aliases)}
    moves_buffers = any(t.is_new for t in plan.tensors)
    wrapped: dict[str, Any] = {}
    moved: dict[object, torch.Tensor] = {}
    changes: list[_Change] = []
    for slot, old in slots(module):
        new: torch.Tensor = old
        name = first_name.get(slot.name, "")
        if name in loaded.tensors:
            if name not in wrapped:
                wrapped[name] = _like(old, loaded.tensors[name], name in loaded.replaced)
            new = wrapped[name]
        elif slot.name in made and (old.is_meta or (slot.kind == "buffer" and moves_buffers)):
            value = _as_planned(made[slot.name], old, plan)
            value = value.to(device_of(slot.name, plan.options.device))
            new = wrapped.setdefault(f"made {id(old)}", _like(old, value, False))
        elif slot.name in made:
            before, value = old.detach().clone(), made[slot.name].expand(old.shape)
            at = slot.owner, slot.table, slot.attribute, slot.name
            changes.append(_Overwrite(*at, before, value))
        elif slot.kind == "buffer" and not old.is_meta and not name and moves_buffers:
            device = device_of(slot.name, plan.options.device)
            # Registered in several modules it stays one, as far as they are on one device.
            place = identity(old), device
            if device != "cpu" and place not in moved:
                moved[place] = old.to(device)
            new = moved.get(place, old)
        if new is not old:
            changes.append(_Change(slot.owner, slot.table, slot.attribute, slot.name, old, new))
    return changes


def _as_planned(value: torch.Tensor, old: torch.Tensor, plan: Plan) -> torch.Tensor:
    """A value that the module's own code gave, in memory of its own and of the planned dtype."""
    dtype = old.dtype
    if plan.options.dtype is not None and dtype.is_floating_point:
        dtype = getattr(torch, str(plan.options.dtype.torch_name))
    return value.detach().to(dtype, copy=True).expand(old.shape).contiguous()


def _like(old: torch.Tensor, new: torch.Tensor, is_given: bool) -> torch.Tensor:
    """``new`` with the class and attributes of ``old``; if it was given, only as a parameter.

    Whole numbers, which may be given, cannot require a gradient.
    """
    if is_wrapper(old) and is_dtensor(old):
        return around(old, new)
    if isinstance(new, nn.Parameter) or (is_given and not isinstance(old, nn.Parameter)):
        return new
    if is_given:
        differentiable = new.is_floating_point() or new.is_complex()
        return nn.Parameter(new, requires_grad=old.requires_grad and differentiable)
    if type(old) is torch.Tensor and not vars(old):
        return new
    made = torch.Tensor._make_subclass(type(old), new, old.requires_grad)
    made.__dict__.update(old.__dict__)
    return made
