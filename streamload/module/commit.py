"""A module's tensors as a plan's targets, and the commit that puts new ones in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from streamload.core.dtypes import BY_TORCH_NAME
from streamload.core.errors import PlanError
from streamload.engine.on_layer import Replacements
from streamload.planning.devices import device_of
from streamload.planning.records import Plan, Targets, TargetSpec

__all__ = ["OnAssign", "commit", "existing_tensors", "real_tensors", "targets_of"]

# on_assign(stored_name, module_name), before each assignment, from the caller's thread.
OnAssign: TypeAlias = Callable[[str, str], object]


def targets_of(module: nn.Module) -> Targets:
    """Every parameter and buffer of ``module``; tied names share one spec.

    Names are one tensor if they are one object, or hold the very same memory in the same way.

    Raises:
        PlanError: a lazy parameter, whose shape is not known yet.
    """
    names: dict[object, list[str]] = {}
    tensors: dict[object, tuple[torch.Tensor, str, bool]] = {}
    for owner, attribute, name, kind in _slots(module):
        tensor = _table(owner, kind)[attribute]
        assert tensor is not None, "_slots leaves empty ones out"
        if is_lazy(tensor):
            raise PlanError(f"{name!r} is a lazy parameter: run the module once before loading")
        key = _identity(tensor)
        persistent = kind == "parameter" or attribute not in owner._non_persistent_buffers_set
        names.setdefault(key, []).append(name)
        known = tensors.get(key)
        is_kept = persistent or (known is not None and known[2])
        tensors[key] = (tensor, known[1] if known else kind, is_kept)
    return Targets(
        tuple(
            _spec(tuple(names[key]), tensor, kind, persistent)
            for key, (tensor, kind, persistent) in tensors.items()
        )
    )


def real_tensors(module: nn.Module) -> Iterator[tuple[list[str], torch.Tensor, bool]]:
    """Each tensor that holds data: its names, itself, and whether a checkpoint should have it.

    Ties are one, as in ``targets_of``; all but non-persistent buffers belong in a checkpoint.
    """
    found: dict[object, tuple[list[str], torch.Tensor, list[bool]]] = {}
    for owner, attribute, name, kind in _slots(module):
        tensor = _table(owner, kind)[attribute]
        if tensor.is_meta or is_lazy(tensor):
            continue
        is_kept = kind == "parameter" or attribute not in owner._non_persistent_buffers_set
        names, _, kept = found.setdefault(_identity(tensor), ([], tensor, []))
        names.append(name)
        kept.append(is_kept)
    for names, tensor, kept in found.values():
        yield names, tensor.detach(), any(kept)


def existing_tensors(module: nn.Module, plan: Plan) -> dict[str, torch.Tensor]:
    """The tensors that the plan overwrites in place, detached, by target name."""
    wanted = {t.name for t in plan.tensors if not t.is_new}
    return {
        name: tensor.detach()
        for owner, attribute, name, kind in _slots(module)
        if name in wanted and (tensor := _table(owner, kind)[attribute]) is not None
    }


def _slots(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, str]]:
    """(owner, attribute, full name, kind) of every tensor, tied names included.

    Parameters first, as ``named_parameters``: so the first name of a tie is a parameter's.
    """
    for kind in ("parameter", "buffer"):
        for path, owner in module.named_modules(remove_duplicate=False):
            for attribute, tensor in _table(owner, kind).items():
                if tensor is not None:
                    yield owner, attribute, f"{path}.{attribute}" if path else attribute, kind


def _table(owner: nn.Module, kind: str) -> dict[str, Any]:
    return owner._parameters if kind == "parameter" else owner._buffers


def _identity(tensor: torch.Tensor) -> object:
    if tensor.is_meta or tensor.numel() == 0 or type(tensor) not in (torch.Tensor, nn.Parameter):
        return id(tensor)
    if tensor.layout != torch.strided:
        return id(tensor)
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    view = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return (*place, *view, str(tensor.device))


def _spec(names: tuple[str, ...], tensor: torch.Tensor, kind: str, persistent: bool) -> TargetSpec:
    dtype = BY_TORCH_NAME.get(str(tensor.dtype).removeprefix("torch."))
    if tensor.layout != torch.strided or not (tensor.is_meta or _has_memory(tensor)):
        raise PlanError(
            f"{names[0]!r} is a {type(tensor).__name__} of layout {tensor.layout} without plain "
            "memory, which cannot be loaded into"
        )
    if dtype is None:
        raise PlanError(f"{names[0]!r} has dtype {tensor.dtype}, which cannot be loaded")
    is_meta = tensor.is_meta
    return TargetSpec(
        names,
        tuple(tensor.shape),
        dtype.name,
        kind,
        is_meta,
        persistent,
        str(tensor.device) if not is_meta else "cpu",
        None if is_meta else tensor.stride(),
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for subclasses that merely wrap other tensors (quantised or distributed ones)."""
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


@dataclass(slots=True)
class _Change:
    """One entry of a module's table that is to hold another tensor, or another module."""

    table: dict[str, Any]
    attribute: str
    name: str
    old: Any
    new: Any
    owner: nn.Module

    def make(self) -> None:
        """Put the new tensor in its place."""
        self._put(self.new)

    def undo(self) -> None:
        """Put the old one back."""
        self._put(self.old)

    def _put(self, tensor: Any) -> None:
        self.table[self.attribute] = tensor
        if isinstance(self.owner, nn.RNNBase):
            # Recurrent layers keep a second list of their weights, which forward() uses.
            names = self.owner._flat_weights_names
            if self.attribute in names:
                self.owner._flat_weights[names.index(self.attribute)] = tensor


def commit(
    module: nn.Module,
    plan: Plan,
    loaded: Replacements,
    *,
    on_assign: OnAssign | None = None,
) -> None:
    """Put all new tensors in their place at once; on any exception the module is as it was.

    Kept: Parameter subclass and attributes, ``requires_grad``, ties, order, hooks. Real buffers
    that the file does not hold are moved to the plan's device and never cast.

    Args:
        module: the module the plan was made for.
        plan: what goes where.
        loaded: new tensors by target name, and modules that take the place of those of their
            names; of tensors that come from the caller their own class is kept.
        on_assign: called with (stored name, module name) before each assignment.

    Raises:
        PlanError: a module of ``loaded`` has no place; nothing was changed.
    """
    changes = _changes(module, plan, loaded) + _swaps(module, loaded.modules)
    sources = {t.name: [plan.stored[s].name for s in t.sources] for t in plan.tensors}
    done: list[_Change] = []
    try:
        for change in changes:
            if on_assign is not None:
                for stored in sources.get(change.name, ()):
                    on_assign(stored, change.name)
            done.append(change)
            change.make()
        if on_assign is not None:
            for planned in plan.tensors:
                if not planned.is_new:
                    for stored in sources[planned.name]:
                        on_assign(stored, planned.name)
    except BaseException:
        for change in reversed(done):
            change.undo()
        raise


def _swaps(module: nn.Module, modules: Mapping[str, nn.Module]) -> list[_Change]:
    """Every place where a named module stands, also under another name."""
    changes: list[_Change] = []
    held = dict(module.named_modules(remove_duplicate=False))
    for name, new in modules.items():
        if not name or name not in held:
            raise PlanError(f"on_layer returned a module for {name!r}, which the model has not")
        for path, owner in held.items():
            changes += [
                _Change(owner._modules, attribute, f"{path}.{attribute}", child, new, owner)
                for attribute, child in owner._modules.items()
                if child is held[name]
            ]
    return changes


def _changes(
    module: nn.Module,
    plan: Plan,
    loaded: Replacements,
) -> list[_Change]:
    planned_of = {n: t.name for t in plan.tensors for n in (t.name, *t.aliases)}
    wrapped: dict[str, Any] = {}
    changes: list[_Change] = []
    for owner, attribute, name, kind in _slots(module):
        table = _table(owner, kind)
        old = table[attribute]
        primary = planned_of.get(name, "")
        if primary in loaded.tensors:
            if primary not in wrapped:
                like = _given_like if primary in loaded.replaced else _like
                wrapped[primary] = like(old, loaded.tensors[primary])
            changes.append(_Change(table, attribute, name, old, wrapped[primary], owner))
        elif kind == "buffer" and not old.is_meta and name not in planned_of:
            moved = _moved(old, name, plan)
            if moved is not old:
                changes.append(_Change(table, attribute, name, old, moved, owner))
    return changes


def _moved(buffer: torch.Tensor, name: str, plan: Plan) -> torch.Tensor:
    device = device_of(name, plan.options.device)
    if device == "cpu" or not any(t.is_new for t in plan.tensors):
        return buffer
    return buffer.to(device)


def _given_like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``new`` as a parameter if ``old`` is one; whole numbers cannot require a gradient."""
    if not isinstance(old, nn.Parameter) or isinstance(new, nn.Parameter):
        return new
    differentiable = new.is_floating_point() or new.is_complex()
    return nn.Parameter(new, requires_grad=old.requires_grad and differentiable)


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``new`` with the class, attributes and ``requires_grad`` of ``old``."""
    if not isinstance(old, nn.Parameter):
        return new
    if isinstance(new, nn.Parameter):
        return new
    if type(old) is nn.Parameter:
        made: torch.Tensor = nn.Parameter(new, requires_grad=old.requires_grad)
    else:
        made = torch.Tensor._make_subclass(type(old), new, old.requires_grad)
    made.__dict__.update(old.__dict__)
    return made
