"""Reading a file again and again: directly, through the page cache, and where one is missing."""

from __future__ import annotations

import errno
import mmap
import os

import pytest

from streamload.core.errors import CheckpointError, ReadError
from streamload.residency import direct
from streamload.residency.direct import AgainFile

PAGE = 4096
SIZE = 5 * PAGE + 123


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "file"
    made.write_bytes(bytes(at * 7 % 251 for at in range(SIZE)))
    return str(made)


def read(file, offset, nbytes, *, is_cached=False):
    memory = mmap.mmap(-1, nbytes)
    file.read(offset, memoryview(memory), is_cached=lambda: is_cached)
    return bytes(memory)


def no_direct(monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT", raising=False)


def refused_at_opening(monkeypatch):
    class Refused(direct._DirectFile):
        def _open(self):
            raise OSError(errno.EINVAL, "no direct reading here")

    monkeypatch.setattr(direct, "_DirectFile", Refused)


def refused_at_reading(monkeypatch):
    def read_pages(*_):
        raise OSError(errno.EINVAL, "no direct reading here")

    monkeypatch.setattr(direct._DirectFile, "read_pages", read_pages)


def no_positioned_reads(monkeypatch):
    monkeypatch.delattr(os, "preadv", raising=False)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)


def as_it_is(_monkeypatch):
    pass


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize(
    "without",
    [as_it_is, no_direct, refused_at_opening, refused_at_reading, no_positioned_reads],
)
def test_bytes_are_those_of_the_file(path, monkeypatch, without, is_cached):
    without(monkeypatch)
    with open(path, "rb") as plain:
        whole = plain.read()
    file = AgainFile(path)
    for _ in range(12):  # both ways are tried, and one chosen
        for offset, nbytes in ((0, PAGE), (PAGE, 2 * PAGE), (4 * PAGE, 2 * PAGE)):
            found = read(file, offset, nbytes, is_cached=is_cached)
            wanted = whole[offset : offset + nbytes]
            assert found[: len(wanted)] == wanted
    file.close()


@pytest.mark.parametrize("without", [as_it_is, no_direct])
def test_a_file_that_was_cut_is_an_error(path, monkeypatch, without):
    without(monkeypatch)
    file = AgainFile(path)
    os.truncate(path, PAGE)
    for _ in range(3):
        with pytest.raises(ReadError, match="ended early"):
            read(file, 2 * PAGE, 2 * PAGE)
    file.close()


def test_no_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        AgainFile(str(tmp_path / "none"))


@pytest.mark.parametrize(("slow", "expected"), [("direct", False), ("plain", True)])
def test_the_faster_way_is_chosen(path, monkeypatch, slow, expected):
    """By the clock that reads, not by what this machine's disk happens to be."""
    clock = [0.0]
    monkeypatch.setattr(direct.time, "perf_counter", lambda: clock[0])
    ways = []
    file = AgainFile(path)
    if file._direct is None:
        pytest.skip("no direct reading on this file system")

    def passing(is_direct, seconds, call):
        def timed(*args, **named):
            ways.append(is_direct)
            clock[0] += seconds
            return call(*args, **named)

        return timed

    seconds = {"direct": 1.0, "plain": 1.0} | {slow: 3.0}
    monkeypatch.setattr(file, "_read_directly", passing(True, seconds["direct"], lambda *_: True))
    monkeypatch.setattr(file, "_read_plain", passing(False, seconds["plain"], lambda *_, **__: 0))
    for _ in range(100):
        read(file, 0, PAGE)
    assert set(ways[:16]) == {True, False}
    assert set(ways[-50:]) == {expected}
    file.close()
