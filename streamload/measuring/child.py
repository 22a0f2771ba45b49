"""The process that is measured: ``python -m streamload.measuring.child ORDER`` (JSON)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from streamload.core.errors import MemoryBudgetError
from streamload.measuring.machine import Usage
from streamload.measuring.watch import Channel
from streamload.system.memory import available_memory

__all__ = ["MODES"]

MODES: Mapping[str, Mapping[str, Any]] = {
    "stream": {},
    "stored": {"layout": "stored"},
    "map": {"mode": "map"},
}
"""Streamload's ways to load, and the options that ask for each."""

_Task = Callable[[], Any]


def main() -> None:
    """Do what the order says, in steps that the parent asks for.

    The order has ``do`` (a mode, ``floor_read``, ``floor_cast`` or ``copy``), ``path``,
    ``workers``, ``dtype``, ``chunk_bytes`` and ``tensors`` (load tensors without a model).
    """
    order = json.loads(sys.argv[1])
    channel = Channel()
    task = _prepared(order)
    channel.say(event="ready")
    channel.wait()
    before, start_s = Usage.read(), time.perf_counter()
    result = task()
    loaded_s = time.perf_counter()
    touched_bytes = _touch(result, order["workers"])
    used_s = time.perf_counter()
    channel.say(
        event="used",
        load_s=loaded_s - start_s,
        first_use_s=used_s - loaded_s,
        touched_bytes=touched_bytes,
        copy_bytes_per_s=result if order["do"] == "copy" else None,
        written_bytes=_written(result),
        **Usage.read().since(before),
    )
    channel.wait()


def _prepared(order: dict[str, Any]) -> _Task:
    """Everything imported, and for the floor everything planned."""
    import torch

    import streamload
    from streamload.measuring import floor, touch  # noqa: F401
    from streamload.measuring.imports import import_for_loads

    import_for_loads()

    workers, path = order["workers"], order["path"]
    if order["do"] == "copy":
        return lambda: floor.copy_rate(workers=workers)
    if order["do"] in MODES:
        options = {"workers": workers, "dtype": order["dtype"], **MODES[order["do"]]}
        if order["chunk_bytes"] is not None:
            options["chunk_bytes"] = order["chunk_bytes"]
        if order["tensors"]:
            load_state_dict = streamload.load_state_dict
            return lambda: load_state_dict(path, mapping=lambda name: name, **options)
        load = streamload.load
        return lambda: load(path, **options)
    from streamload.measuring.survey import survey

    found = survey(path, dtype=order["dtype"])
    if order["do"] == "floor_read":
        return lambda: floor.read_only(found.pieces, workers=workers)
    room = available_memory()
    if found.model_bytes > room.bytes:
        raise MemoryBudgetError(
            f"{found.model_bytes} bytes are needed, {room.bytes} are available ({room.limit})",
            needed_bytes=found.model_bytes,
            available_bytes=room.bytes,
            limit=room.limit,
        )
    dtype = None if order["dtype"] is None else getattr(torch, order["dtype"])
    return lambda: floor.read_and_cast(found.pieces, dtype, workers=workers)


def _touch(result: Any, workers: int) -> int:
    from streamload.measuring.touch import tensors_of, touch

    if result is None or isinstance(result, float):
        return 0
    return touch(tensors_of(result), workers=workers)


def _written(result: Any) -> int | None:
    """Bytes that were streamed rather than mapped, where a report says so."""
    report = getattr(result, "report", None)
    return None if report is None else int(report.bytes_written)


if __name__ == "__main__":
    main()
