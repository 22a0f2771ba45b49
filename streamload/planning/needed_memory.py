"""What a plan needs of memory, in bytes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamload.core.encoding import staging_bytes as decoding_bytes
from streamload.core.options import Settings
from streamload.core.report import MemoryReport
from streamload.core.specs import TensorSpec
from streamload.planning.records import PlannedTensor

# What every load to a device goes through, whatever the model: four buffers of 16 MiB.
RING_BYTES = 64 << 20


def needed_memory(
    tensors: Sequence[PlannedTensor], stored: Mapping[str, TensorSpec], options: Settings
) -> MemoryReport:
    """Bytes of all new tensors in host memory, and of the buffers beside them.

    The buffers are a chunk for each worker, a staged matrix each where one is transposed, tensors
    that can only be read whole, what decoding takes, and the ring if anything goes to a device.
    """
    new_bytes = ring = largest = turned = whole = 0
    for tensor in tensors:
        if tensor.mapped is not None:
            continue
        if tensor.device.partition(":")[0] != "cpu":
            ring = RING_BYTES
            continue
        nbytes = tensor.nbytes
        new_bytes += nbytes if tensor.is_new else 0
        if any(copy.turns for copy in tensor.copies):
            turned = max(turned, nbytes)
        for name in tensor.sources:
            spec = stored[name]
            largest = max(largest, spec.nbytes)
            if spec.encoding is not None:
                whole = max(whole, decoding_bytes(spec))
            elif spec.extent is None:
                whole = max(whole, spec.nbytes)
    chunk, panel = min(options.chunk_bytes, largest), min(options.staging_bytes, turned)
    staging_bytes = ring + options.workers * (chunk + panel + whole)
    return MemoryReport(needed_bytes=new_bytes + staging_bytes, staging_bytes=staging_bytes)
