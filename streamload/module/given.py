"""What callers pass for a module."""

from __future__ import annotations

from torch import nn


def check_module(module: object, path: object = None) -> None:
    """Raise TypeError with what to pass instead, unless it is a module.

    Args:
        module: as given.
        path: what was given after it; the two may be turned.
    """
    if isinstance(module, nn.Module):
        return
    if isinstance(getattr(module, "model", None), nn.Module):
        raise TypeError("the module is .model of what load returned")
    if isinstance(path, nn.Module):
        raise TypeError("the module comes first, then the path")
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise TypeError(f"{module.__name__} is a class: pass a module built of it")
    raise TypeError(f"the module must be a torch.nn.Module, not {type(module).__name__}")
