"""How much memory a stretch of code took at most, and how much there is. No torch import.

Figures of this process come from ``/proc/self/status`` (proc(5)), elsewhere from psutil; limits
come from ``/proc/meminfo``, ``RLIMIT_AS`` and every control group above the process, in both
versions of that interface (Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst of
the Linux kernel).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from streamload.system.cgroups import cgroups, key_values, own_cgroups
from streamload.system.threads import end_thread

__all__ = [
    "AvailableMemory",
    "MemoryPeaks",
    "MemorySample",
    "PeakSampler",
    "ProcessMemory",
    "StatusReader",
    "available_memory",
    "cgroup_peak_bytes",
    "parse_status",
]


@dataclass(frozen=True, slots=True)
class MemoryPeaks:
    """The most memory held at any moment, over what was held at the start.

    Attributes:
        rss_bytes: resident memory of this process.
        anonymous_bytes: its part that no file backs; all of it where the system does not tell.
        file_bytes: its part that files or shared memory back (mapped pages can be given back).
        cgroup_bytes: usage of the control group, page cache included; None outside of any.
    """

    rss_bytes: int
    anonymous_bytes: int
    file_bytes: int
    cgroup_bytes: int | None


class ProcessMemory(NamedTuple):
    """What one process holds at one moment, in bytes; ``high_water`` is its largest RSS ever."""

    rss: int
    anonymous: int
    file: int
    high_water: int


class MemorySample(NamedTuple):
    """One sample of a trace: seconds since the start, bytes held (not over the start)."""

    elapsed_s: float
    rss_bytes: int
    anonymous_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """What can still be allocated, and which limit says so: ``"machine"`` or ``"cgroup"``."""

    bytes: int
    limit: str


def parse_status(text: bytes) -> ProcessMemory:
    """The figures in the text of a ``/proc/PID/status`` file (its "kB" are 1024 bytes).

    A process that is gone or a kernel thread has none: all zeros.
    """
    found = {b"VmRSS": 0, b"VmHWM": 0, b"RssAnon": -1, b"RssFile": 0, b"RssShmem": 0}
    start = text.find(b"VmHWM:")
    for line in text[start:].splitlines() if start >= 0 else ():
        key, _, value = line.partition(b":")
        if key in found:
            found[key] = int(value.split()[0]) << 10
            if key == b"RssShmem":
                break
    anonymous = found[b"RssAnon"]
    if anonymous < 0:  # kernels before 4.5 do not split
        return ProcessMemory(found[b"VmRSS"], found[b"VmRSS"], 0, found[b"VmHWM"])
    file = found[b"RssFile"] + found[b"RssShmem"]
    return ProcessMemory(found[b"VmRSS"], anonymous, file, found[b"VmHWM"])


class StatusReader:
    """Reads a process's memory again and again; close it, or use it in a ``with``.

    The file is kept open and read at offset 0, which costs a few microseconds; where there is no
    ``/proc``, psutil is asked instead, which knows the RSS alone.

    Args:
        pid: the process; None is this one.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._fd = -1
        self._rss: Callable[[], int] | None = None
        path = f"/proc/{'self' if pid is None else pid}/status"
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            self._rss = _psutil_rss(pid)

    def read(self) -> ProcessMemory:
        """The figures of this moment; zeros if the process has ended."""
        if self._rss is not None:
            rss = self._rss()
            return ProcessMemory(rss, rss, 0, 0)
        try:
            return parse_status(os.pread(self._fd, 8192, 0))
        except ProcessLookupError:
            return ProcessMemory(0, 0, 0, 0)

    def close(self) -> None:
        """Gives the descriptor back; twice does no harm."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # An interrupt may fall between the opening and the `with`.
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __enter__(self) -> StatusReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _psutil_rss(pid: int | None) -> Callable[[], int]:
    import psutil

    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"no process {pid}") from error

    def rss() -> int:
        try:
            return int(process.memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    return rss


class PeakSampler:
    """Context manager that watches this process's memory from a thread of its own.

    The kernel's high-water mark fills in what falls between two samples, so that the peak RSS is
    exact whenever it is the largest of the process's life; the two parts are as sampled. Nothing
    of the process is changed (the mark is not reset). One sample costs about 30 microseconds.

    Args:
        interval_s: seconds between two samples.
        record: keep every sample in ``samples``.
    """

    def __init__(self, *, interval_s: float = 0.01, record: bool = False) -> None:
        self.samples: list[MemorySample] = []
        self._interval_s = interval_s
        self._record = record
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._status: StatusReader | None = None
        self._usage_fd = -1
        self._first = self._top = ProcessMemory(0, 0, 0, 0)
        self._first_usage: int | None = None
        self._top_usage = 0
        self._start_s = 0.0

    @property
    def peaks(self) -> MemoryPeaks:
        """The peaks so far; final after the ``with`` block."""
        if self._status is not None:
            self._sample()
        first, top = self._first, self._top
        rss = top.rss
        if top.high_water > first.high_water:
            rss = max(rss, top.high_water)
        cgroup = None if self._first_usage is None else self._top_usage - self._first_usage
        return MemoryPeaks(
            rss - first.rss, top.anonymous - first.anonymous, top.file - first.file, cgroup
        )

    def __enter__(self) -> PeakSampler:
        self._stop.clear()
        self.samples.clear()
        self._start_s = time.perf_counter()
        try:
            self._status = StatusReader()
            self._usage_fd = _open_own_usage()
            self._first = self._top = self._status.read()
            self._first_usage = self._read_usage()
            self._top_usage = self._first_usage or 0
            self._keep(self._first)
            self._thread = threading.Thread(target=self._run, name="streamload-memory", daemon=True)
            self._thread.start()
        except BaseException:
            self._stop.set()
            if self._thread is not None:
                end_thread(self._thread)
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        try:
            self._sample()
        finally:
            if self._thread is not None:
                end_thread(self._thread)
            self._close()

    def __del__(self) -> None:
        if self._status is not None or self._usage_fd >= 0:
            self._close()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            if self._status is None:
                return
            now, top = self._status.read(), self._top
            self._top = ProcessMemory(*map(max, now, top))
            if self._first_usage is not None:
                self._top_usage = max(self._top_usage, self._read_usage() or 0)
            self._keep(now)

    def _keep(self, now: ProcessMemory) -> None:
        if self._record:
            elapsed_s = time.perf_counter() - self._start_s
            self.samples.append(MemorySample(elapsed_s, now.rss, now.anonymous, now.file))

    def _read_usage(self) -> int | None:
        if self._usage_fd < 0:
            return None
        try:
            return int(os.pread(self._usage_fd, 64, 0))
        except (OSError, ValueError):  # the group was removed meanwhile
            return None

    def _close(self) -> None:
        with self._lock:
            status, self._status = self._status, None
            if status is not None:
                status.close()
            fd, self._usage_fd = self._usage_fd, -1
            if fd >= 0:
                os.close(fd)
            self._thread = None


def available_memory(*, root: str = "/") -> AvailableMemory:
    """What this process can still allocate before a limit stops it.

    The smallest of: the machine's MemAvailable, the room in every control group from the
    process's own up to the root (file pages that can be dropped count as free), and the address
    space left under ``RLIMIT_AS``.

    Args:
        root: folder under which ``proc`` and the control groups lie.
    """
    best = AvailableMemory(_machine_available(root), "machine")
    for group in cgroups(root):
        room = group.room()
        if room is not None and room < best.bytes:
            best = AvailableMemory(room, "cgroup")
    return best


def cgroup_peak_bytes(*, root: str = "/") -> int | None:
    """The most the process's own control group ever used, or None where it is not told.

    Page cache is included. From ``memory.peak`` (version 2) or ``memory.max_usage_in_bytes``.
    """
    for group in own_cgroups(root):
        peak = group.number(group.peak)
        if peak is not None:
            return peak
    return None


def _machine_available(root: str) -> int:
    fields = key_values(os.path.join(root, "proc/meminfo"))
    if "MemAvailable:" in fields:
        free = fields["MemAvailable:"] << 10
    elif "MemFree:" in fields:  # kernels before 3.14
        free = (fields["MemFree:"] + fields.get("Cached:", 0)) << 10
    else:
        import psutil

        free = int(psutil.virtual_memory().available)
    return min(free, _address_space_left(root))


def _address_space_left(root: str) -> int:
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    used = key_values(os.path.join(root, "proc/self/status")).get("VmSize:", 0) << 10
    return max(0, limit - used)


def _open_own_usage() -> int:
    for group in own_cgroups("/"):
        try:
            path = os.path.join(group.folder, group.usage)
            return os.open(path, os.O_RDONLY)
        except OSError:
            continue
    return -1
