"""A file mapped once, privately and copy-on-write: tensors are views of it, nothing is touched.

Unlike ``UntypedStorage.from_file`` the mapping reserves no memory, so that a file larger than
RAM can be mapped; writing to a tensor changes that tensor alone, never the file.
"""

from __future__ import annotations

import errno
import mmap

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import ReadError
from streamload.core.specs import TensorSpec, contiguous_strides
from streamload.sources.blocks import torch_dtype
from streamload.sources.files import OpenFile

# MAP_NORESERVE is not in the mmap module before Python 3.13; the number is Linux's.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class MappedFile:
    """One mapping of one file; lives as long as any tensor made from it.

    The file must not be cut while a tensor lives: the kernel then kills the process on access.
    """

    def __init__(self, file: OpenFile) -> None:
        self._path = file.path
        try:
            region = _map(file.fileno())
        except OSError as error:
            raise ReadError(
                f"cannot be mapped: {error.strerror}", path=file.path, errno=error.errno
            ) from error
        if len(region) != file.size_bytes:
            raise ReadError(
                f"the file was changed after it was opened: expected {file.size_bytes} bytes, "
                f"found {len(region)}",
                path=file.path,
                errno=errno.ESTALE,
            )
        self._bytes = torch.frombuffer(region, dtype=torch.uint8)

    def tensor(self, spec: TensorSpec) -> torch.Tensor | None:
        """A view of ``spec``'s bytes, or None if they are not aligned to the element size."""
        extent, size = spec.extent, BY_NAME[spec.dtype].itemsize
        if extent is None or extent.nbytes == 0:
            return None
        if extent.offset % size:
            return None
        flat = self._bytes[extent.offset : extent.offset + extent.nbytes]
        strides = spec.strides or contiguous_strides(spec.shape)
        return flat.view(torch_dtype(spec.dtype)).as_strided(spec.shape, strides)


def _map(descriptor: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    import sys

    flags = mmap.MAP_PRIVATE | (_NO_RESERVE if sys.platform == "linux" else 0)
    return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
