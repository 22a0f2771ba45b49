"""What a plan needs of memory, in bytes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamload.core.options import Settings
from streamload.core.specs import TensorSpec
from streamload.planning.records import PlannedTensor

__all__ = ["RING_BYTES", "needed_bytes", "staging_bytes"]

# What every load to a device goes through, whatever the model: four buffers of 16 MiB.
RING_BYTES = 64 << 20


def staging_bytes(
    tensors: Sequence[PlannedTensor], stored: Mapping[str, TensorSpec], options: Settings
) -> int:
    """Bytes of all workers' buffers: a block each, a staged matrix each where one is turned,
    and tensors that can only be read whole; and of the ring if anything goes to a device.
    """
    streamed = [t for t in tensors if t.mapped is None]
    ring = 0 if all(map(_in_host, streamed)) else RING_BYTES
    return ring + _worker_bytes([t for t in streamed if _in_host(t)], stored, options)


def _worker_bytes(
    streamed: Sequence[PlannedTensor], stored: Mapping[str, TensorSpec], options: Settings
) -> int:
    if not streamed:
        return 0
    largest = max(stored[name].nbytes for t in streamed for name in t.sources)
    block = min(options.chunk_bytes, largest)
    turned = [t.nbytes for t in streamed if any(m.turns for m in t.copies)]
    panel = min(options.staging_bytes, max(turned, default=0))
    whole = max(
        (stored[n].nbytes for t in streamed for n in t.sources if stored[n].extent is None),
        default=0,
    )
    return options.workers * (block + panel + whole)


def needed_bytes(
    tensors: Sequence[PlannedTensor], stored: Mapping[str, TensorSpec], options: Settings
) -> int:
    """Bytes of all new tensors in host memory, and of the buffers beside them."""
    new = sum(t.nbytes for t in tensors if t.is_new and t.mapped is None and _in_host(t))
    return new + staging_bytes(tensors, stored, options)


def _in_host(tensor: PlannedTensor) -> bool:
    return tensor.device.partition(":")[0] == "cpu"
