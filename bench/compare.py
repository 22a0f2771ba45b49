"""All loaders on one checkpoint, in rounds, each measurement a process of its own."""

from __future__ import annotations

import datetime
import json
import os
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bench import machine
from bench.checkpoints import results_dir
from bench.job import Job, Peer
from bench.measure import measure_load, prepare
from streamload.measuring import page_cache
from streamload.measuring.machine import BUSY_CPUS

__all__ = ["Comparison", "Row", "compare", "rows_of", "warnings_of", "write_lines"]


@dataclass(frozen=True)
class Comparison:
    """What is asked for.

    Attributes:
        path: folder or file to load.
        dtype: torch name to cast to; None keeps the stored one.
        rounds: how often each loader is measured.
        cold: drop the files from the page cache before each measurement.
        limit_bytes: memory of a control group made for each measurement.
    """

    path: str
    dtype: str | None
    workers: int
    rounds: int
    cold: bool = False
    limit_bytes: int | None = None
    timeout_s: float = 600

    def job(self, peer: Peer) -> Job:
        key = _identity(self.path)
        # .bin copies are the same for all that read them.
        own = "torch" if "torch" in peer.name or peer.name == "litgpt_lazy" else peer.name
        own_dir = os.path.join(results_dir(), "own-formats", key, own)
        return Job(self.path, self.dtype, self.workers, own_dir)


def _identity(path: str) -> str:
    """A folder's name for copies of this checkpoint: another one if its files were changed."""
    files = Job(path, None, 1, "").files
    facts = [(os.path.abspath(f), os.path.getsize(f), os.stat(f).st_mtime_ns) for f in files]
    name = os.path.basename(os.path.abspath(path))
    return f"{name}-{zlib.crc32(repr(facts).encode()):08x}"


@dataclass(frozen=True)
class Row:
    """One loader's rounds together: medians, and the spread of the headline."""

    label: str
    delivers: str
    reason: str | None
    rounds: int = 0
    median: dict[str, float] | None = None
    total_range_s: tuple[float, float] = (0.0, 0.0)
    values: str = ""


def compare(
    asked: Comparison, peers: Iterable[Peer], *, tell: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Measures; yields the head line, then one line per measurement as it is taken."""
    peers = list(peers)
    packages = {
        "torch",
        "safetensors",
        "numpy",
        *(n.split(".")[0] for p in peers for n in p.imported),
    }
    yield {
        "kind": "run",
        "command": "compare",
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "path": os.path.basename(os.path.abspath(asked.path)),
        "dtype": asked.dtype,
        "workers": asked.workers,
        "rounds": asked.rounds,
        "cold": asked.cold,
        "limit_bytes": asked.limit_bytes,
        "machine": machine.describe(asked.path),
        "versions": machine.versions(packages),
    }
    ready: list[Peer] = []
    for peer in peers:
        reason = _ready(asked, peer, tell)
        if reason is None:
            ready.append(peer)
        else:
            yield _failed(peer, reason)
    for number in range(asked.rounds):
        # Another order every round, so that none always follows the same one.
        shift = number * len(ready) // max(1, asked.rounds)
        for peer in ready[shift:] + ready[:shift]:
            tell(f"round {number + 1} of {asked.rounds}: {peer.label}")
            yield {"round": number + 1, **_measure(asked, peer)}


def _ready(asked: Comparison, peer: Peer, tell: Callable[[str], None]) -> str | None:
    reason = peer.available()
    if reason is None and peer.prepares:
        tell(f"preparing: {peer.label}")
        reason = prepare(peer, asked.job(peer))
    return reason


def _failed(peer: Peer, reason: str) -> dict[str, Any]:
    return {
        "kind": "load",
        "round": 0,
        "peer": peer.name,
        "label": peer.label,
        "delivers": peer.delivers,
        "ok": False,
        "reason": reason,
    }


def _measure(asked: Comparison, peer: Peer) -> dict[str, Any]:
    job = asked.job(peer)
    files = _files(job)
    not_cold = page_cache.make(files, cold=asked.cold)
    before = page_cache.resident_fraction(files)
    found = measure_load(peer, job, limit_bytes=asked.limit_bytes, timeout_s=asked.timeout_s)
    return found | {
        "cache": "cold (fadvise)" if asked.cold and not_cold is None else "warm",
        "cache_problem": not_cold,
        "resident_before": before,
    }


def _files(job: Job) -> list[str]:
    """What the peer will read: its own files if it has any."""
    if os.path.isdir(job.own_dir):
        own = [os.path.join(job.own_dir, name) for name in sorted(os.listdir(job.own_dir))]
        if own:
            return own
    return job.files


def write_lines(lines: Iterable[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """Appends each line to ``path`` as it comes, and keeps it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    kept = []
    with open(path, "a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
            file.flush()
            kept.append(line)
    return kept


_MEDIANS = (
    "import_s", "load_s", "first_use_s", "total_s", "bytes_per_s",
    "peak_rss_bytes", "peak_anonymous_bytes", "peak_file_bytes", "peak_cgroup_bytes",
)  # fmt: skip


def rows_of(lines: Iterable[dict[str, Any]]) -> list[Row]:
    """One row per loader: the floor first, then by time, then those that failed."""
    by_peer: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["kind"] == "load":
            by_peer.setdefault(line["peer"], []).append(line)
    rows = [_row(measured) for measured in by_peer.values()]

    def order(row: Row) -> tuple[bool, bool, float]:
        total_s = row.median["total_s"] if row.median else 0.0
        return (row.median is None, not row.label.startswith("floor"), total_s)

    return sorted(rows, key=order)


def _row(measured: list[dict[str, Any]]) -> Row:
    label, delivers = measured[0]["label"], measured[0]["delivers"]
    good = [line for line in measured if line["ok"]]
    if len(good) < len(measured):
        reason = next(line["reason"] for line in measured if not line["ok"])
        if good:
            reason = f"{len(measured) - len(good)} of {len(measured)} rounds: {reason}"
        return Row(label, delivers, reason or "failed")
    median = {
        key: statistics.median(line[key] for line in good)
        for key in _MEDIANS
        if all(line.get(key) is not None for line in good)
    }
    totals = [line["total_s"] for line in good]
    wrong = [line["values"] for line in good if line["values"] not in ("right", "none kept")]
    values = wrong[0] if wrong else good[0]["values"]
    return Row(label, delivers, None, len(good), median, (min(totals), max(totals)), values)


def warnings_of(lines: Iterable[dict[str, Any]]) -> list[str]:
    """What a reader must know about how the figures came about."""
    lines = list(lines)
    head, loads = lines[0], [line for line in lines[1:] if line["ok"]]
    said = []
    problems = sorted({line["cache_problem"] for line in loads if line.get("cache_problem")})
    if problems:
        said.append(f"The page cache could not be dropped: {'; '.join(problems)}.")
    others = [x["other_cpus"] for x in loads if x["other_cpus"] is not None]
    busy = [cpus for cpus in others if cpus > BUSY_CPUS]
    if busy:
        said.append(
            f"The machine was busy: in {len(busy)} of {len(others)} measurements other processes "
            f"used up to {max(busy):.1f} of {head['machine']['cpus']} CPUs."
        )
    stolen = max((line["stolen_cpus"] or 0.0 for line in loads), default=0.0)
    if stolen > 0.05:
        said.append(f"The host took up to {stolen:.2f} CPUs away (steal time).")
    if not others:
        said.append("Whether other processes were computing is not known on this system.")
    return said
