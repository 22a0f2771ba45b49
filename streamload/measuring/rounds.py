"""The runner: measurements in turns, each in a process of its own, and what their rounds say."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from streamload.measuring import page_cache
from streamload.measuring.control_group import make_group
from streamload.measuring.machine import BUSY_CPUS
from streamload.measuring.peers import Job, Peer
from streamload.measuring.watch import Watch, watch_process

_STOLEN_CPUS = 0.05
_T = TypeVar("_T")


def in_turns(things: Sequence[_T], rounds: int) -> Iterator[tuple[int, _T]]:
    """Every thing once a round, with the round's number, in another order every round.

    So none always follows the same one.
    """
    for number in range(rounds):
        shift = number * len(things) // rounds
        for thing in [*things[shift:], *things[:shift]]:
            yield number + 1, thing


def set_cache(files: Sequence[str], *, cold: bool) -> dict[str, Any]:
    """Drop the files from the page cache or read them into it; returns how that went."""
    if not cold:
        page_cache.warm(files)
    problem = page_cache.drop(files) if cold else None
    return {"cache_problem": problem, "resident_before": page_cache.resident_fraction(files)}


def measure_load(
    peer: Peer,
    job: Job,
    *,
    limit_bytes: int | None = None,
    timeout_s: float = 600,
    grouped: bool = True,
    first_use: bool = True,
) -> dict[str, Any]:
    """Load once; returns the figures as one flat JSON object.

    The process is ended after ``timeout_s``. ``grouped`` puts it into a control group of its own
    where that can be made, of at most ``limit_bytes``. With ``first_use`` every byte is used once
    after the load, as part of the measurement.
    """
    order = _order("load", peer, job) | {"first_use": first_use}
    watch = run_child(order, limit_bytes=limit_bytes, timeout_s=timeout_s, grouped=grouped)
    used = {key: value for key, value in watch.event("used").items() if key != "event"}
    if watch.failure is not None or not used:
        return {"ok": False, "reason": watch.failure or "ended early"}
    return {
        "ok": True,
        "reason": None,
        "values": watch.event("checked").get("values", "not checked"),
        "import_s": watch.event("ready").get("import_s"),
        "total_s": used["load_s"] + used["first_use_s"],
        **used,
        **watch.figures(),
    }


def prepare(peer: Peer, job: Job, *, timeout_s: float = 1200) -> str | None:
    """Let the peer make its own files, in a process of its own; returns why it could not."""
    return run_child(_order("prepare", peer, job), timeout_s=timeout_s, grouped=False).failure


def watch_tokens(
    peer: Peer,
    job: Job,
    ids: Sequence[int],
    count: int,
    *,
    timeout_s: float,
    limit_bytes: int | None = None,
) -> Watch:
    """Let the peer continue ``ids`` by ``count`` tokens, each an event."""
    order = _order("tokens", peer, job) | {"ids": ids, "count": count}
    return run_child(order, timeout_s=timeout_s, limit_bytes=limit_bytes)


def _order(do: str, peer: Peer, job: Job) -> dict[str, Any]:
    return {"do": do, "peer": peer.reference, "job": job.to_order()}


def run_child(
    order: dict[str, Any],
    *,
    timeout_s: float,
    limit_bytes: int | None = None,
    grouped: bool = True,
) -> Watch:
    """Start ``streamload.measuring.child`` with ``order`` and watch it to its end."""
    group = make_group(f"bench-{os.getpid()}", limit_bytes) if grouped else None
    if isinstance(group, str):
        if limit_bytes is not None:
            return Watch(failure=f"no memory limit: {group}")
        group = None
    order = order | {"cgroup": group.folder if group else None}
    try:
        return watch_process(
            [sys.executable, "-m", "streamload.measuring.child", json.dumps(order)],
            timeout_s=timeout_s,
            # The child finds whatever this process finds.
            environment=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            group=group,
            limit_bytes=limit_bytes,
        )
    finally:
        if group is not None:
            group.remove()


def medians(lines: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """Medians of the rounds, and the range of ``total_s``.

    A failure in any round is the whole row's. A figure that a round does not have is None.
    """
    reason = next((line["reason"] or "failed" for line in lines if not line["ok"]), None)
    if reason is not None:
        return {"ok": False, "reason": reason}
    row: dict[str, Any] = {"ok": True, "reason": None}
    for key in keys:
        values = [line.get(key) for line in lines]
        known = [value for value in values if value is not None]
        row[key] = statistics.median(known) if len(known) == len(values) else None
    totals = [line["total_s"] for line in lines]
    return row | {"total_range_s": [min(totals), max(totals)]}


def disturbances(lines: Sequence[dict[str, Any]], cpus: int) -> list[str]:
    """What others did to these measurements, in sentences."""
    good, notes = [line for line in lines if line["ok"]], []
    others = [line["other_cpus"] for line in good if line["other_cpus"] is not None]
    busy = [count for count in others if count > BUSY_CPUS]
    if busy:
        notes.append(
            f"The machine was busy: in {len(busy)} of {len(others)} measurements other processes "
            f"used up to {max(busy):.1f} of {cpus} CPUs."
        )
    stolen = max((line["stolen_cpus"] or 0.0 for line in good), default=0.0)
    if stolen > _STOLEN_CPUS:
        notes.append(f"The host took up to {stolen:.2f} CPUs away (steal time).")
    if good and not others:
        notes.append("Whether other processes were computing is not known on this system.")
    return notes
