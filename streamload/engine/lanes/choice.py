"""Which lane serves a device, and which devices there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch

from streamload.core.options import Settings
from streamload.engine.lanes.base import Lane
from streamload.engine.lanes.cpu import CpuLane, PagedCpuLane
from streamload.engine.lanes.device import DeviceLane
from streamload.engine.lanes.plain import PlainOps
from streamload.engine.lanes.ring import DeviceOps
from streamload.engine.lanes.several import DeviceLanes
from streamload.planning.needed_memory import on_host, ring_of
from streamload.sources.blocks import torch_dtype


def lane_for(devices: Iterable[str], options: Settings, *, passing: bool = False) -> Lane:
    """The lane for tensors that are planned for ``devices``; the CPU's if there are none.

    Call it from the thread whose current stream is to see the tensors.

    Args:
        devices: of all tensors, settled.
        options: how much is read at once, and the ring's budget.
        passing: tensors may be let go during the load (``on_layer``).
    """
    lanes = {d: _lane(d, options, passing) for d in sorted(set(devices) or {"cpu"})}
    return DeviceLanes(lanes) if len(lanes) > 1 else next(iter(lanes.values()))


def _lane(device: str, options: Settings, passing: bool) -> Lane:
    if on_host(device):
        return (PagedCpuLane if passing else CpuLane)(chunk_bytes=options.chunk_bytes)
    slots, slot_bytes = ring_of(options)
    return DeviceLane(_operations(device), slots=slots, slot_bytes=slot_bytes)


def _operations(device: str) -> DeviceOps:
    if torch.device(device).type == "cuda":
        from streamload.engine.lanes.cuda import CudaOps

        return CudaOps(device)
    return PlainOps(device)


def settled(settings: Settings, held: Collection[str] = ()) -> Settings:
    """The settings with devices by number, so that ``cuda`` and ``cuda:0`` are one.

    Without a number, a device is the one of its kind that holds the module already, if there is
    just one in ``held``, or else the current one. What is not usable stays as it is given.
    """
    device = settings.device
    if isinstance(device, str):
        return replace(settings, device=_numbered(device, held))
    return replace(settings, device={prefix: _numbered(d, held) for prefix, d in device.items()})


def _numbered(device: str, held: Collection[str]) -> str:
    if on_host(device) or unusable(device):
        return device
    own = [name for name in held if name.partition(":")[0] == device]
    if len(own) == 1:
        return own[0]
    where = torch.device(device)
    if ":" in device:
        return str(where)
    if where.type == "cuda":  # makes nothing on any device
        return f"cuda:{torch.cuda.current_device()}"
    return str(torch.empty(0, device=where).device)


def unusable(device: str) -> str | None:
    """Why tensors cannot be loaded to ``device``, or None if they can; allocates nothing."""
    try:
        where = torch.device(device)
    except RuntimeError:
        return f"device {device!r} is not one that torch knows"
    reason = ""
    if where.type == "meta":
        reason = "tensors on it hold no values"
    elif where.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available():
            reason = "torch sees no CUDA device"
        elif where.index is not None and where.index >= count:
            reason = f"there are {count} CUDA devices, counted from 0"
    elif where.type == "mps" and not torch.backends.mps.is_available():
        reason = "torch sees no MPS device"
    else:
        try:
            torch.empty(0, device=where)
        except (RuntimeError, AssertionError, ImportError) as error:
            # Behind the first sentence come lists of backends, of thousands of characters.
            reason = str(error).partition("\n")[0].partition(". ")[0]
    return f"device {device!r} is not available here: {reason}" if reason else None


def unholdable(device: str, dtype: str) -> str | None:
    """Why a usable device cannot hold a dtype (MPS has no 64-bit floats), or None if it can."""
    if torch.device(device).type == "cuda":
        return None  # holds all of torch's
    try:
        torch.empty(0, dtype=torch_dtype(dtype), device=device)
    except (TypeError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return None
