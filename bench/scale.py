"""How time and memory grow: with the size of the model, and with the number of tensors."""

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from bench import checkpoints
from bench.compare import load_line
from bench.job import Job
from bench.machine import head_line
from bench.report import tables
from streamload.measuring import page_cache
from streamload.measuring.peers import Peer

Point: TypeAlias = tuple[float, float, float]
"""Size, seconds, bytes."""


class _Task(Peer):
    """One call on a path, its imports before the clock starts; nothing is used afterwards."""

    def __init__(self, label: str, module: str, call: Callable[[Any, str], Any]) -> None:
        super().__init__(label, label, "")
        self.imported = ("torch", module)
        self._call = call

    def load(self, job: Job) -> Any:
        return self._call(sys.modules[self.imported[-1]], job.path)


_TENSORS = (
    _Task("streamload load_state_dict", "streamload.loading.calls",
          lambda calls, path: calls.load_state_dict(path)),
    _Task("safetensors load_file", "safetensors.torch", lambda torch, path: torch.load_file(path)),
)  # fmt: skip
_HOLES = (
    _Task("streamload plan", "streamload.loading.calls",
          lambda calls, path: calls.plan_checkpoint(path, mode="map").report.loaded),
    _Task("streamload map", "streamload.loading.calls",
          lambda calls, path: calls.load(path, mode="map").model.state_dict()),
)  # fmt: skip
PEERS = {task.label: task for task in (*_TENSORS, *_HOLES)}


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
    """Measure; yields the head line, then one line per measurement.

    The peers load each of ``models``, for time and memory against bytes; files of ``counts`` many
    small tensors are loaded, too. ``holes``: also plan and map a file of 20 billion parameters
    that takes no space on disk.
    """
    asked = {"dtype": dtype, "workers": workers, "rounds": rounds}
    yield head_line("scale", checkpoints.results_dir(), peers, name=", ".join(models), **asked)
    for model in models:
        job = Job(checkpoints.checkpoint(model), dtype, workers)
        size = sum(piece.nbytes for piece in job.pieces)
        for peer in [*peers] * rounds:
            tell(f"{model}: {peer.label}")
            page_cache.warm(job.files)
            yield load_line(peer, job) | {"kind": "size", "size": size, "name": model}
    for count in counts:
        job = Job(checkpoints.many_tensors(count), None, workers)
        for task in _TENSORS * rounds:
            tell(f"{count} tensors: {task.label}")
            about = {"kind": "tensors", "size": count, "name": f"{count} tensors"}
            yield load_line(task, job, first_use=False) | about
    if holes:
        job = Job(checkpoints.with_holes(), None, workers)
        size = os.path.getsize(job.files[0])
        for task in _HOLES * rounds:
            tell(f"20 billion parameters: {task.label}")
            about = {"kind": "holes", "size": size, "name": "20B with holes"}
            yield load_line(task, job, first_use=False) | about


def series(lines: Sequence[dict[str, Any]], kind: str) -> dict[str, list[Point]]:
    """Label to (size, seconds, bytes) of one kind, the fastest round of each size."""
    points = sorted(
        (line["label"], line["size"], line["total_s"], line["peak_rss_bytes"])
        for line in lines
        if line["kind"] == kind and line["ok"]
    )
    found: dict[str, dict[float, Point]] = {}
    for label, *point in points:
        found.setdefault(label, {}).setdefault(point[0], tuple(point))
    return {label: list(by_size.values()) for label, by_size in found.items()}


def exponent(points: Sequence[Point], column: int) -> float | None:
    """The b of ``y = a * size ** b`` through the points, by least squares of the logarithms."""
    pairs = [(math.log(p[0]), math.log(p[column])) for p in points if p[0] > 0 and p[column] > 0]
    try:
        return statistics.linear_regression(*zip(*pairs, strict=True)).slope if pairs else None
    except statistics.StatisticsError:  # one size only
        return None


def report(lines: Sequence[dict[str, Any]], width: int | None = None) -> str:
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
    more = ["", *fits, *(f"Failed: {text}" for text in failed)]
    return tables.document(lines, columns, body, (2, 3), more, width=width)
