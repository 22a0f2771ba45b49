"""Torch's side of stored bytes: element types, and a tensor's memory as bytes."""

from __future__ import annotations

import ctypes

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import CheckpointError


def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype for a safetensors dtype name.

    Raises:
        CheckpointError: torch has no dense counterpart.
    """
    torch_name = BY_NAME[name].torch_name
    found = getattr(torch, torch_name, None) if torch_name else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"dtype {name} has no counterpart in torch {torch.__version__}")
    return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense CPU tensor in memory order, writable; valid while the tensor lives."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    raw = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    return memoryview(raw).cast("B")
