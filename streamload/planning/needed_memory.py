"""What a plan needs of memory, in bytes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamload.core.options import Settings
from streamload.core.report import MemoryReport
from streamload.core.specs import TensorSpec
from streamload.planning.device_memory import on_host, ring_bytes
from streamload.planning.records import PlannedTensor


def needed_memory(
    tensors: Sequence[PlannedTensor], stored: Mapping[str, TensorSpec], options: Settings
) -> MemoryReport:
    """Bytes of all new tensors in host memory, and of the buffers beside them.

    The buffers are a chunk for each worker, a staged matrix each where one is transposed, tensors
    that can only be read whole, and a ring for each device that anything goes to.
    """
    new_bytes = largest = turned = whole = 0
    for tensor in tensors:
        if tensor.mapped is not None:
            continue
        for name in tensor.sources:
            whole = max(whole, stored[name].nbytes if stored[name].extent is None else 0)
        if not on_host(tensor.device):
            continue
        nbytes = tensor.nbytes
        new_bytes += nbytes if tensor.is_new else 0
        if any(copy.turns for copy in tensor.copies):
            turned = max(turned, nbytes)
        for name in tensor.sources:
            largest = max(largest, stored[name].nbytes)
    chunk, panel = min(options.chunk_bytes, largest), min(options.staging_bytes, turned)
    staging_bytes = ring_bytes(tensors, options) + options.workers * (chunk + panel + whole)
    return MemoryReport(needed_bytes=new_bytes + staging_bytes, staging_bytes=staging_bytes)
