"""One measurement: a process of its own, watched from outside.

The child says in JSON lines when it is ready, and when what it loaded has been used; in between
this side reads its memory every few milliseconds. After each of the two it waits for a line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from streamload.measuring.control_group import Group
from streamload.measuring.machine import cpu_times, storage_bytes
from streamload.system.peaks import ProcessMemory, StatusReader, peaks_between

INTERVAL_S = 0.005
TRACE_POINTS = 240


@dataclasses.dataclass
class Watch:
    """What was seen of one child, from "ready" to "used"; memory in bytes over "ready".

    ``times_s`` says when each event came, in seconds since the process was started, and
    ``storage_bytes`` what had been fetched from disks for it by then.
    """

    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    times_s: list[float] = dataclasses.field(default_factory=list)
    storage_bytes: list[int | None] = dataclasses.field(default_factory=list)
    peaks: dict[str, int | None] = dataclasses.field(default_factory=dict)
    trace: list[list[float]] = dataclasses.field(default_factory=list)
    other_cpus: float | None = None
    stolen_cpus: float | None = None
    failure: str | None = None

    def event(self, name: str) -> dict[str, Any]:
        """The first event of the name, or an empty one."""
        return next((e for e in self.events if e["event"] == name), {})

    def figures(self) -> dict[str, Any]:
        """Memory, what disturbed, and the trace, as JSON has them."""
        return {
            **self.peaks,
            "other_cpus": self.other_cpus,
            "stolen_cpus": self.stolen_cpus,
            "trace": self.trace,
        }


class Channel:
    """The child's side: lines of JSON on what was its standard output.

    A loader that prints must not break the lines: standard output becomes standard error.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def say(self, **event: Any) -> None:
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()

    @staticmethod
    def wait() -> None:
        """Wait for the parent's word.

        Raises:
            EOFError: the parent is gone.
        """
        if not sys.stdin.readline():
            raise EOFError("the parent is gone")


def watch_process(
    arguments: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    group: Group | None = None,
    limit_bytes: int | None = None,
) -> Watch:
    """Start a process that speaks through a Channel, and watch it to its end.

    It is ended after ``timeout_s``. ``group`` is a control group that it puts itself into, whose
    peak is asked for; ``limit_bytes`` is the group's limit, for words about a killed process.
    """
    with tempfile.TemporaryFile() as errors:
        start_s = time.perf_counter()
        pipe = subprocess.PIPE
        child = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=errors, env=environment)
        with child:
            try:
                watch = _Watcher(child, group, start_s).run(timeout_s)
            finally:
                child.kill()
        if watch.failure is None and child.returncode != 0:
            errors.seek(0)
            watch.failure = _reason(child.returncode, errors.read(), limit_bytes)
        return watch


class _Watcher:
    def __init__(self, child: subprocess.Popen[bytes], group: Group | None, start_s: float) -> None:
        self._child = child
        self._group = group
        self._watch = Watch()
        self._start_s = start_s
        self._samples: list[tuple[float, ProcessMemory]] = []
        self._watching = False
        self._group_start = 0
        self._cpu = cpu_times(child.pid)
        # Lines come through a thread: pipes cannot be polled on every system.
        self._lines: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def _listen(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put((time.perf_counter(), line))
        self._lines.put((time.perf_counter(), b""))

    def run(self, timeout_s: float) -> Watch:
        listener = threading.Thread(target=self._listen, daemon=True)
        listener.start()
        with StatusReader(self._child.pid) as status:
            while True:
                line, at_s = None, 0.0
                with contextlib.suppress(queue.Empty):
                    at_s, line = self._lines.get(timeout=INTERVAL_S if self._watching else 0.2)
                if self._watching:
                    self._samples.append((time.perf_counter(), status.read()))
                if line == b"":
                    break
                if line is not None:
                    self._hear(at_s, json.loads(line), status)
                if time.perf_counter() - self._start_s > timeout_s:
                    self._watch.failure = f"took longer than {timeout_s:g} s"
                    self._child.kill()
                    break
        try:
            self._child.wait(timeout=30)
        except subprocess.TimeoutExpired:  # its work is done but a thread of it does not end
            self._watch.failure = "did not end after the load"
            self._child.kill()
        listener.join(timeout=5)
        return self._watch

    def _hear(self, at_s: float, event: dict[str, Any], status: StatusReader) -> None:
        self._watch.events.append(event)
        self._watch.times_s.append(at_s - self._start_s)
        self._watch.storage_bytes.append(storage_bytes(self._child.pid))
        if event["event"] not in ("ready", "used"):
            return
        self._watching = event["event"] == "ready"
        if self._watching and self._group is not None:
            self._group_start = self._group.number(self._group.usage) or 0
        self._samples.append((time.perf_counter(), status.read()))
        if not self._watching:
            self._finish()
        assert self._child.stdin is not None
        self._child.stdin.write(b"go\n")
        self._child.stdin.flush()

    def _finish(self) -> None:
        watch, (began, first) = self._watch, self._samples[0]
        ended, last = self._samples[-1]
        top = ProcessMemory(*map(max, *(memory for _, memory in self._samples)))
        peaks = peaks_between(first, top)
        peak = self._group.number(self._group.peak) if self._group else None
        watch.peaks = {
            **{f"peak_{name}": value for name, value in dataclasses.asdict(peaks).items()},
            "peak_cgroup_bytes": None if peak is None else max(0, peak - self._group_start),
            "start_rss_bytes": first.rss,
            "end_rss_bytes": last.rss,
        }
        step = max(1, len(self._samples) // TRACE_POINTS)
        watch.trace = [
            [round(at - began, 4), m.rss - first.rss, m.anonymous - first.anonymous,
             m.file - first.file]
            for at, m in [*self._samples[::step], self._samples[-1]]
        ]  # fmt: skip
        # From the start of the process: the kernel counts in steps too long for a short load.
        now, before = cpu_times(self._child.pid), self._cpu
        if now is not None and before is not None:
            wall_s = ended - self._start_s
            watch.other_cpus = max(0.0, (now.others_s - before.others_s) / wall_s)
            watch.stolen_cpus = (now.stolen_s - before.stolen_s) / wall_s


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
