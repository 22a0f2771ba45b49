"""A checkpoint made of tensors in memory: for tests, for a ``state_dict``, for exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamload.core.dtypes import BY_TORCH_NAME
from streamload.core.errors import CheckpointError, ReadError
from streamload.core.specs import Catalog, Extent, TensorSpec, is_dense
from streamload.sources.base import Source

if TYPE_CHECKING:
    import torch


class MemorySource(Source):
    """Tensors by stored name, read in blocks like any file.

    The tensors are the caller's: none is copied or written to, and they must not change
    meanwhile. Those that are not dense CPU memory (slices, other devices) are read whole.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        metadata: Mapping[str, str] | None = None,
        path: str = "<memory>",
    ) -> None:
        self.path = path
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        specs = {name: _spec(name, tensor, path) for name, tensor in self._tensors.items()}
        self.catalog = Catalog(specs, dict(metadata or {}))

    def read_into(self, extent: Extent, buffer: memoryview, *, tensor: str | None = None) -> None:
        # ``extent.file`` is the tensor's name here.
        from streamload.sources.blocks import bytes_of

        part = bytes_of(self._tensors[extent.file])[extent.offset : extent.offset + extent.nbytes]
        if part.nbytes != buffer.nbytes:
            raise ReadError(
                f"expected {buffer.nbytes} bytes, found {part.nbytes}",
                path=self.path,
                tensor=tensor or extent.file,
            )
        buffer[:] = part

    def held(self, name: str) -> torch.Tensor | None:
        """The tensor itself, flat, where it is dense; never to be written to."""
        if self.catalog[name].extent is None:
            return None
        values = self._tensors[name]
        return values.as_strided((values.numel(),), (1,), values.storage_offset())

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        values = self._tensors[name].resolve_conj().resolve_neg()
        return torch.empty(values.shape, dtype=values.dtype).copy_(values)


def _spec(name: str, tensor: torch.Tensor, path: str) -> TensorSpec:
    dtype = BY_TORCH_NAME.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f"dtype {tensor.dtype} is unknown", path=path, tensor=name)
    shape = tuple(tensor.shape)
    if not _is_in_host_memory(tensor) or not is_dense(shape, tensor.stride()):
        return TensorSpec(name, dtype.name, shape, path)
    nbytes = tensor.numel() * tensor.element_size()
    strides = None if tensor.is_contiguous() else tensor.stride()
    return TensorSpec(name, dtype.name, shape, path, Extent(name, 0, nbytes), strides)


def _is_in_host_memory(tensor: torch.Tensor) -> bool:
    """True for plain memory whose bytes are the values."""
    import torch

    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return plain and not tensor.is_conj() and not tensor.is_neg()
