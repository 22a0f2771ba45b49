"""What a plan needs of memory, of the host's and of its devices', before anything is allocated."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from streamload.core.dtypes import BY_NAME
from streamload.core.encoding import staging_bytes as decoding_bytes
from streamload.core.options import SLOT_BYTES, Settings, slots_for
from streamload.core.report import MemoryReport
from streamload.core.specs import TensorSpec
from streamload.planning.records import PlannedTensor

# Staging on a device: one is filled while others are cast from.
PANELS = 4
_LEAST_SLOT_BYTES = 64 << 10
# Allocators give memory in units of so many bytes.
_UNIT_BYTES = 512


def needed_memory(
    tensors: Sequence[PlannedTensor], stored: Mapping[str, TensorSpec], options: Settings
) -> MemoryReport:
    """Bytes of all new tensors in host memory, and of the buffers beside them.

    The buffers are a chunk for each worker, a staged matrix each where one is transposed, tensors
    that can only be read whole, what decoding takes, and a ring for each device that anything
    goes to.
    """
    new_bytes = largest = turned = whole = 0
    for tensor in tensors:
        if tensor.mapped is not None:
            continue
        is_here, nbytes = on_host(tensor.device), tensor.nbytes
        for name in tensor.sources:
            spec = stored[name]
            if spec.encoding is not None:
                whole = max(whole, decoding_bytes(spec))
            elif spec.extent is None:
                whole = max(whole, spec.nbytes)
            if is_here and spec.nbytes > largest:
                largest = spec.nbytes
        if is_here and tensor.is_new:
            new_bytes += nbytes
        if is_here and nbytes > turned and any(copy.turns for copy in tensor.copies):
            turned = nbytes
    chunk, panel = min(options.chunk_bytes, largest), min(options.staging_bytes, turned)
    staging_bytes = ring_bytes(tensors, options) + options.workers * (chunk + panel + whole)
    return MemoryReport(needed_bytes=new_bytes + staging_bytes, staging_bytes=staging_bytes)


def ring_of(options: Settings) -> tuple[int, int]:
    """(slots, bytes of each) of a device's ring: more slots than readers, within the budget.

    The size is a power of two, to which page-locked memory is rounded up.
    """
    slots = slots_for(options.workers)
    size = max(min(options.chunk_bytes, SLOT_BYTES, options.ring_bytes // slots), 1)
    size = max(1 << size.bit_length() - 1, _LEAST_SLOT_BYTES)
    return max(min(slots, options.ring_bytes // size), 1), size


@lru_cache
def on_host(device: str) -> bool:
    """True for the CPU, whose memory is the host's."""
    return device.partition(":")[0] == "cpu"


def ring_bytes(tensors: Sequence[PlannedTensor], options: Settings) -> int:
    """Host memory of the rings: one for each device, no larger than what goes through it."""
    slots, size = ring_of(options)
    total = 0
    for moved in _by_device(tensors).values():
        total += min(slots, max(-(-sum(t.nbytes for t in moved) // size), 1)) * size
    return total


def device_bytes(
    tensors: Sequence[PlannedTensor],
    stored: Mapping[str, TensorSpec],
    options: Settings,
    quantized: Collection[str] = (),
) -> dict[str, int]:
    """Bytes that a load takes of each device's own memory: new tensors, and staging.

    Staging is the panels, one more where a row is longer than they are, and what counting
    overflows takes beside them. ``quantized`` tensors are counted as int8.
    """
    _, size = ring_of(options)
    needed: dict[str, int] = {}
    for device, moved in _by_device(tensors).items():
        total = 0
        for tensor in moved:
            nbytes = tensor.nbytes
            if tensor.name in quantized:
                nbytes //= BY_NAME[tensor.dtype].itemsize
            total += -(-nbytes // _UNIT_BYTES) * _UNIT_BYTES if tensor.is_new else 0
        rows = max((_row_bytes(t, stored) for t in moved), default=0)
        casts = any(t.stored_dtype != t.dtype for t in moved)
        needed[device] = total + PANELS * size + (rows if rows > size else 0) + 2 * size * casts
    return needed


def _by_device(tensors: Sequence[PlannedTensor]) -> dict[str, list[PlannedTensor]]:
    found: dict[str, list[PlannedTensor]] = {}
    for tensor in tensors:
        if not on_host(tensor.device) and tensor.mapped is None:
            found.setdefault(tensor.device, []).append(tensor)
    return found


def _row_bytes(tensor: PlannedTensor, stored: Mapping[str, TensorSpec]) -> int:
    """Stored bytes of the longest row that is staged whole."""
    return max(
        (
            copy.source_strides[0] * BY_NAME[stored[copy.stored_name].dtype].itemsize
            for copy in tensor.copies
            if not copy.is_run
        ),
        default=0,
    )
