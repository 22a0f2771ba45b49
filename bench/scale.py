"""How time and memory grow: with the size of the model, and with the number of tensors."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from bench import checkpoints, machine, tables
from bench.job import Job, Peer
from bench.measure import measure_load, run_child
from streamload.measuring import page_cache

__all__ = ["TASKS", "exponent", "report", "scale", "series"]


Point: TypeAlias = tuple[float, float, float]
"""Size, seconds, bytes."""


def _load_state_dict(path: str) -> Callable[[], Any]:
    from streamload import load_state_dict

    return lambda: load_state_dict(path)


def _load_file(path: str) -> Callable[[], Any]:
    from safetensors.torch import load_file

    return lambda: load_file(path)


def _plan(path: str) -> Callable[[], Any]:
    from streamload.loading.calls import plan_checkpoint

    return lambda: plan_checkpoint(path, mode="map").report.loaded


def _map(path: str) -> Callable[[], Any]:
    from streamload import load

    return lambda: load(path, mode="map").model.state_dict()


TASKS: dict[str, Callable[[str], Callable[[], Any]]] = {
    "streamload load_state_dict": _load_state_dict,
    "safetensors load_file": _load_file,
    "streamload plan": _plan,
    "streamload map": _map,
}
"""What a process can be asked for: imports first, then the call that is timed."""


def scale(
    models: Sequence[str],
    counts: Sequence[int],
    peers: Sequence[Peer],
    *,
    dtype: str | None,
    workers: int,
    rounds: int,
    holes: bool,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Measures; yields the head line, then one line per measurement.

    Args:
        models: names of checkpoints, for time and memory against bytes.
        counts: numbers of tensors, for files of many small ones.
        holes: also plan and map a file of 20 billion parameters that takes no space on disk.
    """
    packages = {"torch", "safetensors", *(n.split(".")[0] for p in peers for n in p.imported)}
    yield {
        "kind": "run",
        "command": "scale",
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "path": ", ".join(models),
        "dtype": dtype,
        "workers": workers,
        "rounds": rounds,
        "machine": machine.describe(checkpoints.results_dir()),
        "versions": machine.versions(packages),
    }
    for model in models:
        path = checkpoints.checkpoint(model)
        for peer in [*peers] * rounds:
            tell(f"{model}: {peer.label}")
            reason = peer.available()
            job = Job(path, dtype, workers, "")
            page_cache.warm(job.files)
            found = {"ok": False, "reason": reason} if reason else measure_load(peer, job)
            size = sum(entry.nbytes for entry in job.entries.values())
            yield found | {"kind": "size", "label": peer.label, "size": size, "name": model}
    for count in counts:
        path = checkpoints.many_tensors(count)
        for task in ("streamload load_state_dict", "safetensors load_file") * rounds:
            tell(f"{count} tensors: {task}")
            yield {
                "kind": "tensors",
                "size": count,
                "name": f"{count} tensors",
                **_task(task, path),
            }
    if holes:
        path = checkpoints.with_holes()
        size = os.path.getsize(os.path.join(path, "model.safetensors"))
        for task in ("streamload plan", "streamload map") * rounds:
            tell(f"20 billion parameters: {task}")
            yield {"kind": "holes", "size": size, "name": "20B with holes", **_task(task, path)}


def _task(task: str, path: str) -> dict[str, Any]:
    watch = run_child({"do": "scale", "task": task, "path": path}, limit_bytes=None, timeout_s=600)
    used = watch.event("used")
    if watch.failure is not None or not used:
        return {"label": task, "ok": False, "reason": watch.failure}
    return {
        "label": task,
        "ok": True,
        "reason": None,
        "total_s": used["load_s"],
        "peak_rss_bytes": watch.peaks["peak_rss_bytes"],
        "other_cpus": watch.other_cpus,
        "stolen_cpus": watch.stolen_cpus,
    }


def series(lines: Sequence[dict[str, Any]], kind: str) -> dict[str, list[Point]]:
    """Label to (size, seconds, bytes) of one kind, the fastest round of each size."""
    best: dict[tuple[str, float], Point] = {}
    for line in lines:
        if line["kind"] == kind and line["ok"]:
            key = (line["label"], line["size"])
            point = (line["size"], line["total_s"], line["peak_rss_bytes"])
            if key not in best or point[1] < best[key][1]:
                best[key] = point
    found: dict[str, list[Point]] = {}
    for (label, _), point in sorted(best.items()):
        found.setdefault(label, []).append(point)
    return found


def exponent(points: Sequence[Point], column: int) -> float | None:
    """The b of ``y = a * size ** b`` through the points, by least squares of the logarithms."""
    pairs = [(math.log(p[0]), math.log(p[column])) for p in points if p[0] > 0 and p[column] > 0]
    if len(pairs) < 2:
        return None
    mean_x = sum(x for x, _ in pairs) / len(pairs)
    mean_y = sum(y for _, y in pairs) / len(pairs)
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread if spread else None


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Setting, a table of all points, and the exponents."""
    names = {(line["kind"], line["size"]): line["name"] for line in lines[1:]}
    body, fits = [], []
    for kind in ("size", "tensors", "holes"):
        for label, points in series(lines, kind).items():
            body += [
                [label, names[(kind, p[0])], f"{p[1]:.4f}", f"{p[2] / 2**20:.1f}"] for p in points
            ]
            time, memory = exponent(points, 1), exponent(points, 2)
            if time is not None:
                grows = "" if memory is None else f", memory with the power {memory:.2f}"
                across = "bytes" if kind == "size" else "tensors"
                fits.append(f"{label}: time grows with the power {time:.2f} of {across}{grows}")
    failed = sorted({f"{x['label']}: {x['reason']}" for x in lines[1:] if not x["ok"]})
    columns = ("what", "size", "s (fastest round)", "peak RSS MiB")
    table = tables.render(columns, body, (2, 3))
    parts = [tables.setting(lines[0]), "", table, "", *fits]
    parts += [f"Failed: {text}" for text in failed]
    return "\n".join([*parts, *tables.notes(lines)])
