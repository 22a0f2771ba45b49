"""One measurement: a process of its own, watched from outside.

The child says when it is ready, when what it loaded has been used, and what its values were
worth; in between this side reads its memory from ``/proc/PID/status`` every few milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench.groups import Group, make_group
from bench.job import Job, Peer
from bench.machine import ROOT, CpuTimes
from streamload.memory import ProcessMemory, StatusReader

__all__ = ["Watch", "measure_load", "prepare", "run_child"]

INTERVAL_S = 0.005
TRACE_POINTS = 240
BUSY_CPUS = 0.25
"""Other processes' CPUs, on average over a measurement, from which on it is called disturbed."""


@dataclasses.dataclass
class Watch:
    """What was seen of one child, from "ready" to "used"; memory in bytes over "ready".

    ``times_s`` says when each event came, in seconds since the process was started.
    """

    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    times_s: list[float] = dataclasses.field(default_factory=list)
    peaks: dict[str, int | None] = dataclasses.field(default_factory=dict)
    trace: list[list[float]] = dataclasses.field(default_factory=list)
    other_cpus: float | None = None
    stolen_cpus: float | None = None
    failure: str | None = None

    def event(self, name: str) -> dict[str, Any]:
        return next((e for e in self.events if e["event"] == name), {})


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
        with tempfile.TemporaryFile() as errors:
            start_s = time.perf_counter()
            child = subprocess.Popen(
                [sys.executable, "-m", "bench.child", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
            with child:
                try:
                    watch = _Watcher(child, group, start_s).run(timeout_s)
                finally:
                    child.kill()
            if watch.failure is None and child.returncode != 0:
                errors.seek(0)
                watch.failure = _reason(child.returncode, errors.read(), limit_bytes)
            return watch
    finally:
        if group is not None:
            group.remove()


class _Watcher:
    def __init__(self, child: subprocess.Popen[bytes], group: Group | None, start_s: float) -> None:
        self._child = child
        self._group = group
        self._watch = Watch()
        self._start_s = start_s
        self._samples: list[tuple[float, ProcessMemory]] = []
        self._watching = False
        self._cpu = CpuTimes.read(child.pid)

    def run(self, timeout_s: float) -> Watch:
        assert self._child.stdout is not None
        out = self._child.stdout.fileno()
        pending = b""
        with StatusReader(self._child.pid) as status:
            while True:
                wait_s = INTERVAL_S if self._watching else 0.2
                ready, _, _ = select.select([out], [], [], wait_s)
                if self._watching:
                    self._samples.append((time.perf_counter(), status.read()))
                if ready:
                    data = os.read(out, 65536)
                    if not data:
                        break
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        self._hear(json.loads(line), status)
                if time.perf_counter() - self._start_s > timeout_s:
                    self._watch.failure = f"took longer than {timeout_s:.0f} s"
                    self._child.kill()
                    break
        try:
            self._child.wait(timeout=30)
        except subprocess.TimeoutExpired:  # its work is done but a thread of it does not end
            self._watch.failure = "did not end after the load"
            self._child.kill()
        return self._watch

    def _hear(self, event: dict[str, Any], status: StatusReader) -> None:
        self._watch.events.append(event)
        self._watch.times_s.append(time.perf_counter() - self._start_s)
        if event["event"] == "ready":
            self._group_start = self._group.used_bytes() if self._group else None
            self._samples.append((time.perf_counter(), status.read()))
            self._watching = True
            self._answer()
        elif event["event"] == "used":
            self._samples.append((time.perf_counter(), status.read()))
            self._watching = False
            self._finish()
            self._answer()

    def _answer(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(b"go\n")
        self._child.stdin.flush()

    def _finish(self) -> None:
        watch, (began, first) = self._watch, self._samples[0]
        ended, last = self._samples[-1]
        rss = max(memory.rss for _, memory in self._samples)
        if last.high_water > first.high_water:  # the kernel saw it between two samples
            rss = max(rss, last.high_water)
        watch.peaks = {
            "peak_rss_bytes": rss - first.rss,
            "peak_anonymous_bytes": max(m.anonymous for _, m in self._samples) - first.anonymous,
            "peak_file_bytes": max(m.file for _, m in self._samples) - first.file,
            "peak_cgroup_bytes": self._group_peak(),
            "start_rss_bytes": first.rss,
            "end_rss_bytes": last.rss,
        }
        step = max(1, len(self._samples) // TRACE_POINTS)
        kept = [*self._samples[::step], self._samples[-1]]
        watch.trace = [
            [round(at - began, 4), m.rss - first.rss, m.anonymous - first.anonymous,
             m.file - first.file]
            for at, m in kept
        ]  # fmt: skip
        # From the start of the process: the kernel counts in steps too long for a short load.
        now, before = CpuTimes.read(self._child.pid), self._cpu
        if now is not None and before is not None:
            wall_s = ended - self._start_s
            other_s = (now.busy_s - before.busy_s) - (now.own_s - before.own_s)
            watch.other_cpus = max(0.0, other_s / wall_s)
            watch.stolen_cpus = (now.stolen_s - before.stolen_s) / wall_s

    def _group_peak(self) -> int | None:
        peak = self._group.peak_bytes() if self._group else None
        if peak is None or self._group_start is None:
            return None
        return max(0, peak - self._group_start)


def _reason(code: int, errors: bytes, limit_bytes: int | None) -> str:
    if code == -9:
        return "killed: out of memory" + (" (limit)" if limit_bytes is not None else "")
    if code < 0:
        return f"killed by signal {-code}"
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), f"exit code {code}")
    kind, colon, text = last.partition(": ")
    if " " not in kind:  # an exception, by its full name
        last = kind.rpartition(".")[2] + colon + text
    return last if len(last) <= 160 else last[:157] + "..."
