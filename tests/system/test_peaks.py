"""What the peak sampler reports, against real memory of this process and of others."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from streamload.system import peaks
from streamload.system.peaks import MemoryPeaks, PeakSampler, StatusReader, parse_status

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def fresh(size: int) -> mmap.mmap:
    """Touched memory of its own, whatever the process has freed before."""
    block = mmap.mmap(-1, size)
    for at in range(0, size, MIB):
        block[at : at + MIB] = b"x" * MIB
    return block


def test_status_text_is_split_into_anonymous_and_file() -> None:
    text = (
        b"Name:\tVmHWM: 1 kB\nVmHWM:\t 40 kB\nVmRSS:\t 30 kB\n"
        b"RssAnon:\t 10 kB\nRssFile:\t 15 kB\nRssShmem:\t 5 kB\nVmData:\t 1 kB\n"
    )
    found = parse_status(text)
    assert [n // 1024 for n in found] == [30, 10, 20, 40]
    old = parse_status(b"VmHWM:\t 40 kB\nVmRSS:\t 30 kB\nVmData:\t 1 kB\n")
    assert [n // 1024 for n in old] == [30, 30, 0, 40]
    assert parse_status(b"Name:\tzombie\n") == (0, 0, 0, 0)


@linux
def test_anonymous_peak_is_seen_after_it_was_given_back() -> None:
    with PeakSampler() as sampler:
        block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(b"\1" * (64 * MIB))
        time.sleep(0.05)
        block.close()
    found = sampler.peaks
    # The bytes object written from is as large and alive for a moment.
    assert 64 * MIB <= found.anonymous_bytes < 140 * MIB
    assert found.file_bytes < 8 * MIB
    assert found.rss_bytes >= 64 * MIB


@linux
def test_mapped_file_pages_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"\1" * (32 * MIB))
    with open(path, "rb") as file, PeakSampler() as sampler:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert sum(view[i] for i in range(0, len(view), 4096)) == 32 * MIB // 4096
        inside = sampler.peaks
        view.close()
    assert 30 * MIB <= inside.file_bytes <= sampler.peaks.file_bytes < 48 * MIB
    assert sampler.peaks.anonymous_bytes < 16 * MIB


@linux
def test_high_water_mark_fills_in_what_falls_between_samples() -> None:
    code = (
        "from streamload.system.peaks import PeakSampler\n"
        "with PeakSampler(interval_s=60) as s:\n"
        "    block = bytearray(96 << 20); del block\n"
        "print(s.peaks.rss_bytes)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert 95 * MIB < int(out) < 110 * MIB


def test_the_last_sample_is_taken_at_the_exit() -> None:
    with PeakSampler(interval_s=60, record=True) as sampler:
        block = fresh(48 * MIB)
    assert len(sampler.samples) == 2
    assert sampler.samples[-1][1].rss - sampler.samples[0][1].rss >= 47 * MIB
    assert sampler.peaks.rss_bytes >= 47 * MIB
    assert len(block) == 48 * MIB


def test_trace_has_rising_times_and_figures_at_each() -> None:
    with PeakSampler(interval_s=0.001, record=True) as sampler:
        time.sleep(0.05)
    times = [at_s for at_s, _ in sampler.samples]
    assert times == sorted(times)
    assert len(times) > 5
    assert all(memory.rss > 0 for _, memory in sampler.samples)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@linux
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_thread_and_descriptors_end_with_an_exception(error: type[BaseException]) -> None:
    threads, descriptors = threading.active_count(), _descriptors()
    sampler = PeakSampler()
    with pytest.raises(error), sampler:
        raise error
    assert threading.active_count() == threads
    assert _descriptors() == descriptors
    assert isinstance(sampler.peaks, MemoryPeaks)


@linux
def test_no_thread_left_to_start_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    descriptors = _descriptors()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"), PeakSampler():
        pass
    assert _descriptors() == descriptors


def test_a_sampler_may_be_used_again() -> None:
    sampler = PeakSampler(interval_s=60)
    with sampler:
        block = fresh(64 * MIB)
    first = sampler.peaks.rss_bytes
    with sampler:
        pass
    assert first > 60 * MIB > sampler.peaks.rss_bytes
    del block


@linux
def test_one_sample_is_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sample costs is measured in bench/test_speed.py."""
    calls: list[str] = []

    def counted(name: str) -> None:
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args: calls.append(name) or real(*args))

    with PeakSampler(interval_s=60) as sampler:
        for name in ("open", "pread", "read", "close"):
            counted(name)
        for _ in range(20):
            sampler._sample()
        monkeypatch.undo()
    assert calls == ["pread"] * 20


@linux
def test_agrees_with_what_another_reads_of_this_process() -> None:
    with StatusReader(os.getpid()) as outside:
        before = outside.read()
        with PeakSampler() as sampler:
            block = fresh(64 * MIB)
            after = outside.read()
        assert len(block) == 64 * MIB
    assert sampler.peaks.rss_bytes == pytest.approx(after.rss - before.rss, rel=0.02)


@linux
def test_a_process_that_ended_reads_as_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with StatusReader(child.pid) as status:
        assert status.read().rss > 0
        child.communicate(b"\n")
        assert status.read() == (0, 0, 0, 0)
        status.close()


def test_without_proc_psutil_gives_the_rss(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str, flags: int) -> int:
        raise FileNotFoundError(path)

    monkeypatch.setattr(peaks.os, "open", missing)
    with PeakSampler(interval_s=60) as sampler:
        block = fresh(48 * MIB)
    assert sampler.peaks.rss_bytes == sampler.peaks.anonymous_bytes >= 47 * MIB
    assert sampler.peaks.file_bytes == 0
    assert len(block) == 48 * MIB
    with pytest.raises(ProcessLookupError):
        StatusReader(2**22 + 1)
