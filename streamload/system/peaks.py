"""How much memory a stretch of code took at most. No torch import.

The figures come from ``/proc/PID/status`` (proc(5)), and from psutil where there is no ``/proc``.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamload.system.thread_end import end_thread


@dataclass(frozen=True, slots=True)
class MemoryPeaks:
    """The most memory held at any moment, over what was held at the start.

    Attributes:
        rss_bytes: resident memory of this process.
        anonymous_bytes: its part that no file backs; all of it where the system does not tell.
        file_bytes: its part that files or shared memory back (mapped pages can be given back).
    """

    rss_bytes: int
    anonymous_bytes: int
    file_bytes: int


class ProcessMemory(NamedTuple):
    """What one process holds at one moment, in bytes; ``high_water`` is its largest RSS ever."""

    rss: int
    anonymous: int
    file: int
    high_water: int


_NOTHING = ProcessMemory(0, 0, 0, 0)


def peaks_between(first: ProcessMemory, top: ProcessMemory) -> MemoryPeaks:
    """The peaks of samples whose largest figures are ``top``, over the ``first`` of them."""
    # A high-water mark that rose is what the kernel saw between two samples.
    rss = max(top.rss, top.high_water) if top.high_water > first.high_water else top.rss
    return MemoryPeaks(rss - first.rss, top.anonymous - first.anonymous, top.file - first.file)


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
    rss, high_water, anonymous, file, shared = found.values()
    if anonymous < 0:  # kernels before 4.5 do not split
        return ProcessMemory(rss, rss, 0, high_water)
    return ProcessMemory(rss, anonymous, file + shared, high_water)


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
        self._process: Any = None
        try:
            self._fd = os.open(f"/proc/{'self' if pid is None else pid}/status", os.O_RDONLY)
        except FileNotFoundError:
            import psutil

            try:
                self._process = psutil.Process(pid)
            except psutil.NoSuchProcess as error:
                raise ProcessLookupError(f"no process {pid}") from error

    def read(self) -> ProcessMemory:
        """The figures of this moment; zeros if the process has ended."""
        if self._process is None:
            with suppress(ProcessLookupError):
                return parse_status(os.pread(self._fd, 8192, 0))
            return _NOTHING
        import psutil

        with suppress(psutil.NoSuchProcess):
            rss = int(self._process.memory_info().rss)
            return ProcessMemory(rss, rss, 0, 0)
        return _NOTHING

    def close(self) -> None:
        """Gives the descriptor back; twice does no harm."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close  # an interrupt may fall between the opening and the `with`

    def __enter__(self) -> StatusReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class PeakSampler:
    """Context manager that watches this process's memory from a thread of its own.

    The kernel's high-water mark fills in what falls between two samples, so that the peak RSS is
    exact whenever it is the largest of the process's life; the two parts are as sampled. Nothing
    of the process is changed (the mark is not reset). One sample costs about 25 microseconds.

    Args:
        interval_s: seconds between two samples.
        record: keep every sample in ``samples``, with the seconds since the start.
        most: keep no more than about so many, evenly spread over the time.
    """

    def __init__(
        self, *, interval_s: float = 0.01, record: bool = False, most: int | None = None
    ) -> None:
        self.samples: list[tuple[float, ProcessMemory]] = []
        self._interval_s = interval_s
        self._record = record or most is not None
        self._most = most
        self._every, self._seen = 1, 0
        self._last = (0.0, _NOTHING)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._status: StatusReader | None = None
        self._first = self._top = _NOTHING
        self._start_s = 0.0

    @property
    def peaks(self) -> MemoryPeaks:
        """The peaks so far; final after the ``with`` block."""
        self._sample()
        return peaks_between(self._first, self._top)

    def __enter__(self) -> PeakSampler:
        self._stop.clear()
        self.samples.clear()
        self._every, self._seen = 1, 0
        self._start_s = time.perf_counter()
        try:
            self._status = StatusReader()
            self._first = self._top = self._status.read()
            self._keep(self._first)
            self._thread = threading.Thread(target=self._run, name="streamload-memory", daemon=True)
            self._thread.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._sample()
            if self._record and self.samples[-1] is not self._last:
                self.samples.append(self._last)
        finally:
            self._end()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            if self._status is None:
                return
            now = self._status.read()
            self._top = ProcessMemory(*map(max, now, self._top))
            self._keep(now)

    def _keep(self, now: ProcessMemory) -> None:
        self._last = (time.perf_counter() - self._start_s, now)
        if self._record and self._seen % self._every == 0:
            self.samples.append(self._last)
            if self._most is not None and len(self.samples) > self._most:
                del self.samples[1::2]
                self._every *= 2
        self._seen += 1

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            end_thread(self._thread)
        with self._lock:
            if self._status is not None:
                self._status.close()
            self._status = self._thread = None
