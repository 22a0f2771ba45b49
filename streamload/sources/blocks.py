"""Whole tensors read through a source's block reads, into memory of their own."""

from __future__ import annotations

import ctypes

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import CheckpointError
from streamload.core.specs import TensorSpec, contiguous_strides
from streamload.sources.base import Source

__all__ = ["bytes_of", "read_tensor", "torch_dtype"]


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


def read_tensor(source: Source, spec: TensorSpec) -> torch.Tensor:
    """Read one tensor with an extent; stored dtype and shape, contiguous.

    Raises:
        ReadError: the bytes could not be read.
    """
    if spec.extent is None:
        return source.tensor(spec.name)
    strides = spec.strides or contiguous_strides(spec.shape)
    tensor = torch.empty_strided(spec.shape, strides, dtype=torch_dtype(spec.dtype))
    source.read_into(spec.extent, bytes_of(tensor), tensor=spec.name)
    return tensor.contiguous()
