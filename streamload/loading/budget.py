"""Compares what a plan needs with what there is, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import MemoryBudgetError
from streamload.core.specs import numel
from streamload.core.wording import format_bytes, printable
from streamload.planning import Plan
from streamload.system.memory import available_memory

__all__ = ["check_memory", "is_cache_in_the_way", "measured", "ways_out"]

_MARGIN_BYTES = 128 << 20


def measured(plan: Plan) -> Plan:
    """The plan with what memory there is now."""
    there = available_memory()
    memory = replace(plan.memory, available_bytes=there.bytes, limit=there.limit)
    return replace(plan, memory=memory)


def check_memory(plan: Plan) -> None:
    """Refuse a plan that does not fit; of host memory by what was measured, of devices by asking.

    Raises:
        MemoryBudgetError: it does not fit; the message says which option would.
    """
    memory, options = plan.memory, plan.options
    if memory.needed_bytes > memory.available_bytes:
        raise MemoryBudgetError(
            f"{printable(plan.source)}: needs {format_bytes(memory.needed_bytes)}, but "
            f"{format_bytes(memory.available_bytes)} are available ({memory.limit} limit); "
            f"{'; '.join(ways_out(plan))}",
            needed_bytes=memory.needed_bytes,
            available_bytes=memory.available_bytes,
            limit=memory.limit,
        )
    needed: dict[str, int] = {}
    for tensor in plan.tensors if options.on_layer is None else ():  # what that makes is not known
        if tensor.is_new and tensor.device.partition(":")[0] == "cuda":
            size = numel(tensor.shape) if tensor.name in plan.quantized else tensor.nbytes
            needed[tensor.device] = needed.get(tensor.device, 0) + size
    for device, size in needed.items():
        from streamload.engine.lanes.cuda import free_bytes

        there = free_bytes(device)
        if size > there:
            raise MemoryBudgetError(
                f"{printable(plan.source)}: needs {format_bytes(size)} on {device}, which "
                f"has {format_bytes(there)} left; check_memory=False tries all the same",
                needed_bytes=size,
                available_bytes=there,
                limit="device",
            )


def is_cache_in_the_way(plan: Plan) -> bool:
    """True if a control group has no room for the model and for the file's pages beside it.

    The pages count against the group, so they are given back as soon as they were read. (On a
    machine of its own the kernel drops them when it needs to; the next load is glad of them.)
    """
    memory = plan.memory
    names = {copy.stored_name for t in plan.tensors if t.mapped is None for copy in t.copies}
    read_bytes = sum(plan.stored[name].nbytes for name in names)
    wanted = memory.needed_bytes + read_bytes
    # Reading right up to the limit would already make the kernel look for pages to drop.
    wanted += max(memory.needed_bytes // 10, _MARGIN_BYTES)
    return memory.limit == "cgroup" and wanted > memory.available_bytes


def ways_out(plan: Plan) -> list[str]:
    """Which options would fit, in words."""
    memory = plan.memory
    wide = [t for t in plan.tensors if t.is_new and BY_NAME[t.dtype].itemsize > 2]
    narrow = memory.needed_bytes - sum(
        t.nbytes - t.nbytes * 2 // BY_NAME[t.dtype].itemsize
        for t in wide
        if BY_NAME[t.dtype].kind == "float" and t.mapped is None
    )
    ways = []
    if wide and narrow <= memory.available_bytes:
        ways.append(f"dtype='bfloat16' would need {format_bytes(narrow)}")
    if plan.options.mode != "map":
        ways.append(
            "mode='map' uses no memory of its own for tensors that are not cast (streamload "
            "convert writes a file that can be mapped as it is)"
        )
    ways.append("check_memory=False tries all the same")
    return ways
