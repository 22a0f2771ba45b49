"""Compares what a plan needs with what there is, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import MemoryBudgetError
from streamload.core.specs import stored_bytes
from streamload.core.wording import format_bytes, printable
from streamload.module.quantizing import quantizing_bytes
from streamload.planning.needed_memory import device_bytes
from streamload.planning.records import Plan
from streamload.system.memory import available_memory

_MARGIN_BYTES = 128 << 20


def measured(plan: Plan, *, already_bytes: int = 0) -> Plan:
    """The plan with what memory there is now, and what was taken for it already."""
    there = available_memory()
    available_bytes = there.bytes + already_bytes
    memory = replace(plan.memory, available_bytes=available_bytes, limit=there.limit)
    return replace(plan, memory=memory)


def check_memory(plan: Plan, room: Mapping[str, int]) -> None:
    """Refuse a plan that does not fit.

    Args:
        plan: with what there is of host memory measured.
        room: free bytes of devices that have memory of their own.

    Raises:
        MemoryBudgetError: it does not fit; the message says which option would.
    """
    memory, options = plan.memory, plan.options
    if memory.needed_bytes > memory.available_bytes:
        ways = ways_out(plan)
        fitting = f"would fit: {'; '.join(ways)}; " if ways else ""
        raise MemoryBudgetError(
            f"{printable(plan.source)}: needs {format_bytes(memory.needed_bytes)}, but "
            f"{format_bytes(memory.available_bytes)} are available ({memory.limit} limit); "
            f"{fitting}check_memory=False tries all the same",
            needed_bytes=memory.needed_bytes,
            available_bytes=memory.available_bytes,
            limit=memory.limit,
        )
    if options.on_layer is not None:
        return  # what becomes of its tensors is not known
    needed = device_bytes(plan.tensors, plan.stored, options, plan.quantized)
    for device, free_bytes in room.items():
        size = needed.get(device, 0) + quantizing_bytes(plan, device)
        if size > free_bytes:
            raise MemoryBudgetError(
                f"{printable(plan.source)}: needs {format_bytes(size)} on {device}, which "
                f"has {format_bytes(free_bytes)} left; check_memory=False tries all the same",
                needed_bytes=size,
                available_bytes=free_bytes,
                limit="device",
            )


def is_cache_in_the_way(plan: Plan) -> bool:
    """True if a control group has no room for the model and for the file's pages beside it.

    The pages count against the group, so they are given back as soon as they were read. (On a
    machine of its own the kernel drops them when it needs to; the next load is glad of them.)
    """
    memory = plan.memory
    names = {copy.stored_name for t in plan.tensors if t.mapped is None for copy in t.copies}
    read_bytes = stored_bytes(plan.stored[name] for name in names)
    wanted = memory.needed_bytes + read_bytes
    # Reading right up to the limit would already make the kernel look for pages to drop.
    wanted += max(memory.needed_bytes // 10, _MARGIN_BYTES)
    return memory.limit == "cgroup" and wanted > memory.available_bytes


def ways_out(plan: Plan) -> list[str]:
    """Options with which the load would fit, or need less, in words."""
    memory = plan.memory
    wide = [t for t in plan.tensors if t.is_new and BY_NAME[t.dtype].itemsize > 2]
    narrow = memory.needed_bytes - sum(
        t.nbytes - t.nbytes * 2 // BY_NAME[t.dtype].itemsize
        for t in wide
        if BY_NAME[t.dtype].kind == "float" and t.mapped is None
    )
    ways = []
    if wide and narrow <= memory.available_bytes:
        ways.append(f"dtype='bfloat16' (about {format_bytes(narrow)})")
    if plan.options.device == "cpu":
        ways += _by_mapping(plan)
    if memory.available_bytes and any(t.layer is not None for t in plan.tensors):
        share = memory.available_bytes / memory.needed_bytes
        ways.append(f"layers= with about {share:.0%} of the blocks")
    return ways


def _by_mapping(plan: Plan) -> list[str]:
    """What is a view of the file needs no memory; a cast makes that impossible, a copy possible."""
    memory = plan.memory
    as_stored = sum(
        t.nbytes
        for t in plan.tensors
        if t.is_new and t.mapped is None and t.stored_dtype == t.dtype and len(t.sources) == 1
    )
    left = memory.needed_bytes - as_stored
    by_a_view = bool(as_stored) and left <= memory.available_bytes
    is_mapped = plan.options.mode == "map"
    if is_mapped and (not by_a_view or plan.options.adapter):
        return []
    if by_a_view and not is_mapped:
        return [f"mode='map' (about {format_bytes(left)}: what is not cast is a view of the file)"]
    dtype = plan.options.dtype
    cast = f" --dtype {dtype.torch_name}" if dtype is not None else ""
    return [
        f"mode='map' of a copy that needs no change: streamload convert SRC DST{cast} --names local"
    ]
