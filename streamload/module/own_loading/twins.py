"""Twins of modules: their code and attributes without values; what is done to them stays there."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _WrappedHook

from streamload.module.extra_state import is_container

LOADS = "_load_from_state_dict"


def twin_of(module: nn.Module) -> nn.Module:
    """The module without its values; what is set on it does not reach the module."""
    twin = object.__new__(type(module))
    attributes = vars(module).items()
    vars(twin).update({n: copy.copy(v) if is_container(v) else v for n, v in attributes})
    for table in ("_parameters", "_buffers"):
        tensors = module.__dict__[table].items()
        twin.__dict__[table] = {name: _without_values(tensor) for name, tensor in tensors}
    children = module._modules.items()
    twin.__dict__["_modules"] = {n: None if c is None else twin_of(c) for n, c in children}
    method = vars(module).get(LOADS)
    if method is not None:
        twin.__dict__[LOADS] = _rebound(method, module, twin)
    hooks = OrderedDict(
        (number, _rebound(hook, module, twin))
        for number, hook in module._load_state_dict_pre_hooks.items()
    )
    twin.__dict__["_load_state_dict_pre_hooks"] = hooks
    return twin


def _rebound(hook: Any, module: nn.Module, twin: nn.Module) -> Callable[..., Any]:
    function = getattr(hook, "hook", hook)
    if getattr(function, "__self__", None) is module:
        function = types.MethodType(function.__func__, twin)
    with_module = getattr(hook, "with_module", False)
    return _WrappedHook(function, twin if with_module else None)


def _without_values(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """On meta; a single number that is there stays, since code may pass it on (BatchNorm's)."""
    if tensor is None:
        return None
    if not tensor.is_meta and tensor.numel() == 1 and type(tensor) is torch.Tensor:
        return tensor.detach().clone()
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
