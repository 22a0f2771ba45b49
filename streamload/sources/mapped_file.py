"""A file mapped once, privately and copy-on-write: tensors are views of it, nothing is touched.

Unlike ``UntypedStorage.from_file`` the mapping reserves no memory, so that a file larger than
RAM can be mapped; writing to a tensor changes that tensor alone, never the file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from typing import Any

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import ReadError
from streamload.core.specs import Shape, TensorSpec, contiguous_strides
from streamload.sources.blocks import torch_dtype
from streamload.sources.files import OpenFile

# MAP_NORESERVE is not in the mmap module before Python 3.13; the number is Linux's.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0


class MappedFile:
    """One mapping of one file; lives as long as any tensor made from it.

    The file must not be cut while a tensor lives: the kernel then kills the process on access.
    """

    def __init__(self, file: OpenFile) -> None:
        try:
            with file.descriptor() as descriptor:
                found = os.fstat(descriptor).st_size
                self._region = _map(descriptor, found)
        except OSError as error:
            raise ReadError(
                f"cannot be mapped: {error.strerror}", path=file.path, errno=error.errno
            ) from error
        if found != file.size_bytes:
            raise ReadError(
                f"the file was changed after it was opened: expected {file.size_bytes} bytes, "
                f"found {found}",
                path=file.path,
                errno=errno.ESTALE,
            )

    def tensor(
        self, spec: TensorSpec, shape: Shape, strides: Shape, offset: int
    ) -> torch.Tensor | None:
        """A view of ``spec``'s elements, or None if they are not aligned to the element size.

        Its storage is its own range of the mapping: what is saved, copied or shared of one tensor
        is that tensor, not the file.
        """
        extent, size = spec.extent, BY_NAME[spec.dtype].itemsize
        if extent is None or 0 in shape or extent.offset % size:
            return None
        count = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        assert (offset + count) * size <= extent.nbytes, "views lie within their tensor"
        start = extent.offset + offset * size
        # Not a slice: slices share the storage they are taken from.
        dtype = torch_dtype(spec.dtype)
        flat = torch.frombuffer(self._region, dtype=dtype, count=count, offset=start)
        return flat if (count,) == shape else flat.as_strided(shape, strides)


def whole(spec: TensorSpec) -> tuple[Shape, Shape, int]:
    """Shape, strides and offset of all of a stored tensor."""
    return spec.shape, spec.strides or contiguous_strides(spec.shape), 0


def _map(descriptor: int, nbytes: int) -> Any:
    """The file's bytes as a buffer, unmapped when nothing refers to it any more."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
    # Python's own mmap object holds a descriptor as long as it lives: one for each shard.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NO_RESERVE
    address = libc.mmap(None, nbytes, access, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    region = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit: tensors may outlive what runs then.
    weakref.finalize(region, libc.munmap, address, nbytes).atexit = False
    return region
