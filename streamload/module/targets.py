"""A module's tensors, as they stand and as a plan's targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from streamload.core.dtypes import BY_TORCH_NAME, DType
from streamload.core.errors import PlanError
from streamload.core.findings import Finding
from streamload.module.sharded import held_part, is_dtensor, local_of
from streamload.planning.records import Plan, Targets, TargetSpec

# Every module and its path, as ``walk`` gives them.
Owners: TypeAlias = "Sequence[tuple[str, nn.Module]]"


def walk(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module by its path, each as often as it is reachable, as ``named_modules`` has them.

    That goes through as many generators as a module is deep, for each module.
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(path: str, owner: nn.Module) -> None:
        found.append((path, owner))
        before = f"{path}." if path else ""
        for name, child in owner._modules.items():
            if child is not None:
                visit(before + name, child)

    visit("", module)
    return found


class Slot(NamedTuple):
    """One place of a module that holds a tensor; tied names have one each."""

    owner: nn.Module
    attribute: str
    name: str
    kind: str

    @property
    def table(self) -> dict[str, Any]:
        """The owner's dict that the tensor stands in."""
        return self.owner._parameters if self.kind == "parameter" else self.owner._buffers

    @property
    def is_persistent(self) -> bool:
        """False for buffers that are not part of the ``state_dict``."""
        is_parameter = self.kind == "parameter"
        return is_parameter or self.attribute not in self.owner._non_persistent_buffers_set


def slots(module: nn.Module, owners: Owners = ()) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Every place that holds a tensor, tied names included.

    Parameters first, as ``named_parameters``: so the first name of a tie is a parameter's.
    ``owners`` are the module's own, where it was walked already.
    """
    owners = owners or walk(module)
    for kind in ("parameter", "buffer"):
        for path, owner in owners:
            table = owner._parameters if kind == "parameter" else owner._buffers
            for attribute, tensor in table.items():
                if tensor is not None:
                    name = f"{path}.{attribute}" if path else attribute
                    yield Slot(owner, attribute, name, kind), tensor


@dataclass(slots=True)
class _Tie:
    """One tensor and all of its names; it is persistent if one of its places is."""

    tensor: torch.Tensor
    kind: str
    names: list[str]
    is_persistent: bool


def _ties(module: nn.Module, owners: Owners = ()) -> list[_Tie]:
    """Names are one tensor if they are one object, or hold the very same memory in one way."""
    found: dict[object, _Tie] = {}
    for slot, tensor in slots(module, owners):
        key = identity(tensor)
        tie = found.get(key)
        if tie is None:
            found[key] = _Tie(tensor, slot.kind, [slot.name], slot.is_persistent)
        else:
            tie.names.append(slot.name)
            tie.is_persistent |= slot.is_persistent
    return list(found.values())


def targets_of(module: nn.Module, owners: Owners = ()) -> Targets:
    """Every parameter and buffer of ``module``; tied names share one spec.

    Args:
        module: on meta or not.
        owners: it and all modules in it, where it was walked already.

    Raises:
        PlanError: a tensor that cannot be loaded into, such as a lazy parameter.
    """
    return Targets(tuple([_spec(tie) for tie in _ties(module, owners)]))


def real_tensors(module: nn.Module) -> Iterator[tuple[list[str], torch.Tensor, bool]]:
    """Each tensor that holds data: its names, itself, and whether a checkpoint should have it.

    Ties are one, as in ``targets_of``; all but non-persistent buffers belong in a checkpoint.
    """
    for tie in _ties(module):
        if tie.tensor.is_meta or is_lazy(tie.tensor):
            continue
        if not is_wrapper(tie.tensor):
            yield tie.names, tie.tensor.detach(), tie.is_persistent
        elif is_dtensor(tie.tensor):
            yield tie.names, local_of(tie.tensor), tie.is_persistent


def existing_tensors(module: nn.Module, plan: Plan) -> dict[str, tuple[torch.Tensor, ...]]:
    """What the plan overwrites in place, by target name: every object that a tie consists of.

    They hold the same memory, but each may count its versions for itself. Of a DTensor it is what
    this rank holds.
    """
    first = {n: t.name for t in plan.tensors if not t.is_new for n in (t.name, *t.aliases)}
    found: dict[str, dict[int, torch.Tensor]] = {}
    for slot, tensor in slots(module):
        if slot.name in first:
            objects = found.setdefault(first[slot.name], {})
            if is_wrapper(tensor) and is_dtensor(tensor):
                objects[-id(tensor)] = local_of(tensor)
            objects[id(tensor)] = tensor
    return {name: tuple(objects.values()) for name, objects in found.items()}


def identity(tensor: torch.Tensor) -> object:
    """Equal for what is one tensor: one object, or the very same memory seen in one way."""
    if tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter):
        return id(tensor)
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return id(tensor)
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    view = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return (*place, *view, str(tensor.device))


def _spec(tie: _Tie) -> TargetSpec:
    tensor, name = tie.tensor, tie.names[0]
    wraps, is_meta, dtype = is_wrapper(tensor), tensor.is_meta, _dtype(tensor.dtype)
    if is_lazy(tensor):
        raise PlanError(f"{name!r} is a lazy parameter: run the module once before loading")
    if tensor.layout != torch.strided or not (is_meta or wraps or _has_memory(tensor)):
        raise PlanError(
            f"{name!r} is a {type(tensor).__name__} of layout {tensor.layout} without plain "
            "memory, which cannot be loaded into"
        )
    if dtype is None:
        raise PlanError(f"{name!r} has dtype {tensor.dtype}, which cannot be loaded")
    held, shard, uncut = tensor, None, ""
    if wraps and is_dtensor(tensor):
        (shard, uncut), held, wraps = held_part(tensor), local_of(tensor), False
    return TargetSpec(
        tuple(tie.names),
        tuple(tensor.shape),
        dtype.name,
        tie.kind,
        is_meta,
        tie.is_persistent,
        "cpu" if is_meta else str(held.device),
        None if is_meta else held.stride(),
        wrapper=type(tensor).__name__ if wraps else "",
        shard=shard,
        uncut=uncut,
    )


@lru_cache
def _dtype(dtype: torch.dtype) -> DType | None:
    return BY_TORCH_NAME.get(str(dtype).removeprefix("torch."))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """True for subclasses that hold their values in other tensors (quantised, distributed ones).

    All of them have a ``__torch_dispatch__`` of their own and no memory; on meta, where nothing
    has any, the first decides. Subclasses that merely add attributes have neither.
    """
    return _dispatches(type(tensor)) and (tensor.is_meta or not _has_memory(tensor))


@lru_cache
def _dispatches(kind: type[torch.Tensor]) -> bool:
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_meta or tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


def wrapper_problems(targets: Targets, plan: Plan) -> list[Finding]:
    """What refuses a plan that would put plain values where they cannot be: all of these.

    That is wrapper tensors, and distributed ones whose parts cannot be told.
    """
    wrappers = [spec for spec in targets.specs if spec.wrapper or spec.uncut]
    touched = {t.name for t in plan.tensors} | {entry.name for entry in plan.shape_mismatch}
    if touched.isdisjoint(spec.names[0] for spec in wrappers):
        return []
    return [Finding(_why_not(spec), refuses=True, tensor=spec.names[0]) for spec in wrappers]


def _why_not(spec: TargetSpec) -> str:
    if spec.uncut:
        return f" is distributed in a way that cannot be loaded: {spec.uncut}"
    return (
        f" holds its values in other tensors (class {spec.wrapper}), so that plain "
        "ones cannot take its place: load into the plain module first, then quantise or "
        "shard it"
    )
