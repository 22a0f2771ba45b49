"""A checkpoint made of tensors in memory: for tests, and for users with a ``state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamload.dtypes import BY_TORCH_NAME
from streamload.errors import CheckpointError, ReadError
from streamload.sources.base import SourceBase
from streamload.specs import Catalog, Extent, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["MemorySource"]


class MemorySource(SourceBase):
    """Tensors by stored name, read in blocks like any file.

    The tensors are the caller's: they are never written to, and must not change meanwhile.
    Tensors that are not contiguous are kept as contiguous copies.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        metadata: Mapping[str, str] | None = None,
        path: str = "<memory>",
    ) -> None:
        self.path = path
        self._tensors: dict[str, torch.Tensor] = {}
        specs: dict[str, TensorSpec] = {}
        for name, tensor in tensors.items():
            kept = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            dtype = BY_TORCH_NAME.get(str(kept.dtype).removeprefix("torch."))
            if dtype is None:
                raise CheckpointError(f"dtype {kept.dtype} is unknown", path=path, tensor=name)
            nbytes = kept.numel() * kept.element_size()
            self._tensors[name] = kept
            specs[name] = TensorSpec(
                name, dtype.name, tuple(kept.shape), path, Extent(name, 0, nbytes)
            )
        self.catalog = Catalog(specs, dict(metadata or {}))

    def read_into(self, extent: Extent, buffer: memoryview, *, tensor: str | None = None) -> None:
        """Copy the extent's bytes; ``extent.file`` is the tensor's name here."""
        from streamload.sources.blocks import bytes_of

        held = bytes_of(self._tensors[extent.file])
        part = held[extent.offset : extent.offset + extent.nbytes]
        if part.nbytes != buffer.nbytes:
            raise ReadError(
                f"expected {buffer.nbytes} bytes, found {part.nbytes}",
                path=self.path,
                tensor=tensor or extent.file,
            )
        buffer[:] = part

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of the tensor."""
        return self._tensors[name].clone()
