"""One measurement with a peer: ``bench.child`` in a process of its own, watched from outside."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from bench.groups import Group, make_group
from bench.job import Job, Peer
from bench.machine import ROOT
from streamload.measuring.watch import Watch, watch_process

__all__ = ["measure_load", "prepare", "run_child"]


def measure_load(
    peer: Peer, job: Job, *, limit_bytes: int | None = None, timeout_s: float = 600
) -> dict[str, Any]:
    """Loads once with ``peer``; returns the figures as one flat JSON object."""
    order = {"do": "load", "peer": peer.file, "job": dataclasses.asdict(job)}
    watch = run_child(order, limit_bytes=limit_bytes, timeout_s=timeout_s)
    ready, used = watch.event("ready"), watch.event("used")
    found: dict[str, Any] = {
        "kind": "load",
        "peer": peer.name,
        "label": peer.label,
        "delivers": peer.delivers,
        "ok": watch.failure is None and bool(used),
        "reason": watch.failure,
    }
    if not found["ok"]:
        path = os.path.abspath(job.path)
        found["reason"] = (watch.failure or "ended early").replace(path, os.path.basename(path))
        return found
    file_bytes = sum(entry.nbytes for entry in job.entries.values())
    total_s = used["load_s"] + used["first_use_s"]
    return found | {
        "values": watch.event("checked").get("values", "not checked"),
        "import_s": ready["import_s"],
        "load_s": used["load_s"],
        "first_use_s": used["first_use_s"],
        "total_s": total_s,
        "touched_bytes": used["touched_bytes"],
        "file_bytes": file_bytes,
        "bytes_per_s": file_bytes / total_s,
        **watch.peaks,
        "other_cpus": watch.other_cpus,
        "stolen_cpus": watch.stolen_cpus,
        "trace": watch.trace,
    }


def prepare(peer: Peer, job: Job, *, timeout_s: float = 1200) -> str | None:
    """Lets the peer make its own files, in a process of its own; returns why it could not."""
    order = {"do": "prepare", "peer": peer.file, "job": dataclasses.asdict(job)}
    return run_child(order, limit_bytes=None, timeout_s=timeout_s, grouped=False).failure


def run_child(
    order: dict[str, Any], *, limit_bytes: int | None, timeout_s: float, grouped: bool = True
) -> Watch:
    """Starts ``bench.child`` with ``order`` and watches it to its end."""
    made = make_group(f"bench-{os.getpid()}", limit_bytes) if grouped else "not asked for"
    group = made if isinstance(made, Group) else None
    if group is None and limit_bytes is not None:
        return Watch(failure=f"no memory limit: {made}")
    order = order | {"cgroup": group.folder if group else None}
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    }
    try:
        return watch_process(
            [sys.executable, "-m", "bench.child", json.dumps(order)],
            timeout_s=timeout_s,
            environment=environment,
            group=group,
            limit_bytes=limit_bytes,
        )
    finally:
        if group is not None:
            group.remove()
