"""Reads every byte of a checkpoint once: odd values are counted, digests compared."""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.specs import Extent, TensorSpec
from streamload.engine.lanes.cpu import Buffer
from streamload.engine.threads import use_one_torch_thread
from streamload.sources.addresses import Address, content_address
from streamload.sources.base import Source
from streamload.sources.blocks import bytes_of
from streamload.sources.files import OpenFile
from streamload.sources.hub import folder_of

__all__ = ["DigestCheck", "Findings", "OddValues", "check"]

Progress = Callable[[int, int, str], object]
_PIECE_BYTES = 64 << 20
_TICK_S = 0.1


@dataclass
class OddValues:
    """What is odd about one tensor's values, of those that were read."""

    name: str
    elements: int = 0
    nan: int = 0
    inf: int = 0
    is_zero: bool = True


@dataclass(frozen=True, slots=True)
class DigestCheck:
    """One digest: what the bytes of ``what`` must have and what they have."""

    what: str
    kind: str
    expected: str
    found: str

    @property
    def ok(self) -> bool:
        """True if they are the same."""
        return self.expected == self.found


@dataclass
class Findings:
    """What a reading found; ``values`` by stored name."""

    values: dict[str, OddValues] = field(default_factory=dict)
    digests: list[DigestCheck] = field(default_factory=list)
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class _Segment:
    """A run of bytes; of ``spec`` from its ``start``-th byte on, or of no tensor."""

    offset: int
    nbytes: int
    spec: TensorSpec | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one worker reads in order; all of it makes up ``digest``, if there is one."""

    file: str
    segments: tuple[_Segment, ...]
    digest: Address | None = None
    what: str = ""


def check(
    source: Source, *, workers: int, chunk_bytes: int, progress: Progress | None = None
) -> Findings:
    """Read everything once.

    Args:
        source: an open checkpoint.
        workers: threads that read.
        chunk_bytes: how much one read brings.
        progress: called as progress(done_bytes, total_bytes, file), from this thread.

    Raises:
        ReadError: reading failed, or a file was changed meanwhile.
    """
    findings = Findings({name: OddValues(name) for name in source.catalog})
    pieces = [*_pieces(source)]
    reading = _Reading(source, findings, chunk_bytes)
    total = sum(s.nbytes for piece in pieces for s in piece.segments)
    with ThreadPoolExecutor(workers, initializer=use_one_torch_thread) as pool:
        futures = [pool.submit(reading.read, piece) for piece in pieces]
        _follow(futures, reading, total, progress)
    for spec in source.catalog.tensors.values():
        if spec.extent is None:  # only a source can make its values, and not in parallel
            _count(source.tensor(spec.name).reshape(-1), findings.values[spec.name])
            findings.bytes_read += spec.nbytes
    source.check_unchanged()
    findings.digests += _small_files(source)
    findings.digests.sort(key=lambda digest: digest.what)
    return findings


def _follow(
    futures: list[Future[None]], reading: _Reading, total: int, progress: Progress | None
) -> None:
    left: set[Future[None]] = set(futures)
    try:
        while left:
            done, left = wait(left, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if progress is not None:
                progress(reading.findings.bytes_read, total, reading.at)
    except BaseException:
        reading.stop.set()
        for future in left:
            future.cancel()
        raise


def _pieces(source: Source) -> Iterator[_Piece]:
    files: dict[str, list[TensorSpec]] = {}
    for spec in source.catalog.tensors.values():
        if spec.extent is not None:
            files.setdefault(spec.extent.file, []).append(spec)
    sums: Mapping[Extent, int] = getattr(source, "checksums", {})
    for file, specs in files.items():
        plain, shared = _apart(specs)
        address = content_address(file)
        if address is not None:
            whole = tuple(_covering(plain, 0, os.path.getsize(file)))
            yield _Piece(file, whole, address, file)
        else:
            yield from _by_checksum(file, plain, sums)
        for segment in shared:
            yield _Piece(file, (segment,))


def _apart(specs: list[TensorSpec]) -> tuple[list[_Segment], list[_Segment]]:
    """Tensors one behind the other in the file, and those that lie across others."""
    plain: list[_Segment] = []
    shared: list[_Segment] = []
    end = 0
    for segment in sorted(map(_segment, specs), key=lambda s: (s.offset, s.nbytes)):
        (plain if segment.offset >= end else shared).append(segment)
        end = max(end, segment.offset + segment.nbytes)
    return plain, shared


def _segment(spec: TensorSpec) -> _Segment:
    assert spec.extent is not None, "only called for tensors with bytes in a file"
    return _Segment(spec.extent.offset, spec.extent.nbytes, spec)


def _covering(segments: Sequence[_Segment], begin: int, end: int) -> Iterator[_Segment]:
    """``segments`` and what lies between them, from ``begin`` to ``end``."""
    for segment in segments:
        if segment.offset > begin:
            yield _Segment(begin, segment.offset - begin)
        yield segment
        begin = segment.offset + segment.nbytes
    if end > begin:
        yield _Segment(begin, end - begin)


def _by_checksum(
    file: str, segments: Sequence[_Segment], sums: Mapping[Extent, int]
) -> Iterator[_Piece]:
    """Storages with a checksum as they are; other tensors in pieces for several workers."""
    loose: list[_Segment] = []
    inside: dict[Extent, list[_Segment]] = {}
    extents = sorted((e for e in sums if e.file == file), key=lambda extent: extent.offset)
    starts = [extent.offset for extent in extents]
    for segment in segments:
        extent = extents[max(bisect_right(starts, segment.offset) - 1, 0)] if extents else None
        if extent is not None and _holds(extent, segment):
            inside.setdefault(extent, []).append(segment)
        else:
            loose.append(segment)
    for extent, held_in in inside.items():
        yield _Piece(
            file,
            tuple(_covering(held_in, extent.offset, extent.offset + extent.nbytes)),
            Address("crc32", f"{sums[extent]:08x}"),
            f"{file}: {', '.join(repr(s.spec.name) for s in held_in if s.spec is not None)}",
        )
    yield from _grouped(file, loose)


def _holds(extent: Extent, segment: _Segment) -> bool:
    end = segment.offset + segment.nbytes
    return extent.offset <= segment.offset and end <= extent.offset + extent.nbytes


def _grouped(file: str, segments: Sequence[_Segment]) -> Iterator[_Piece]:
    """Tensors without a digest, so many together that several workers have work."""
    group: list[_Segment] = []
    held = 0
    for segment in segments:
        group.append(segment)
        held += segment.nbytes
        if held >= _PIECE_BYTES:
            yield _Piece(file, tuple(group))
            group, held = [], 0
    if group:
        yield _Piece(file, tuple(group))


class _Reading:
    """The workers' common state."""

    def __init__(self, source: Source, findings: Findings, chunk_bytes: int) -> None:
        self.findings = findings
        self.at = ""
        self.stop = threading.Event()
        self._source = source
        self._chunk_bytes = max(chunk_bytes // 16 * 16, 16)
        self._lock = threading.Lock()

    def read(self, piece: _Piece) -> None:
        """Read a piece from start to end."""
        digest = _digest(piece.digest, sum(s.nbytes for s in piece.segments))
        buffer = Buffer()
        self.at = piece.file
        for segment in piece.segments:
            for start in range(0, segment.nbytes, self._chunk_bytes):
                if self.stop.is_set():
                    return
                size = min(self._chunk_bytes, segment.nbytes - start)
                raw = buffer.elements(size, torch.uint8)
                self._read(piece.file, segment, start, raw, digest)
        if piece.digest is not None:
            found = DigestCheck(
                piece.what, piece.digest.kind, piece.digest.digest, digest.hexdigest()
            )
            with self._lock:
                self.findings.digests.append(found)

    def _read(
        self, file: str, segment: _Segment, start: int, raw: torch.Tensor, digest: _Digest
    ) -> None:
        name = segment.spec.name if segment.spec else None
        extent = Extent(file, segment.offset + start, raw.numel())
        data = bytes_of(raw)
        self._source.read_into(extent, data, tensor=name)
        digest.update(data)
        if segment.spec is not None:
            # Tensors that lie apart are read by one worker each: no lock is needed.
            _count(_typed(raw, segment.spec), self.findings.values[segment.spec.name])
        with self._lock:
            self.findings.bytes_read += raw.numel()


class _Digest(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Crc:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class _Nothing:
    def update(self, data: memoryview, /) -> None:
        del data

    def hexdigest(self) -> str:
        return ""


def _digest(address: Address | None, nbytes: int) -> _Digest:
    if address is None:
        return _Nothing()
    if address.kind == "crc32":
        return _Crc()
    if address.kind == "git-sha1":
        return hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)
    return hashlib.sha256()


def _small_files(source: Source) -> Iterator[DigestCheck]:
    """The other files of a snapshot in a hub cache: configuration, tokenizer, index."""
    folder = folder_of(source.path)
    done = {os.path.realpath(spec.file) for spec in source.catalog.tensors.values()}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        address = content_address(path)
        if address is None or os.path.realpath(path) in done or not os.path.isfile(path):
            continue
        file = OpenFile(path)
        try:
            digest = _digest(address, file.size_bytes)
            for start in range(0, file.size_bytes, 1 << 20):
                size = min(1 << 20, file.size_bytes - start)
                digest.update(memoryview(file.read(start, size)))
        finally:
            file.close()
        yield DigestCheck(path, address.kind, address.digest, digest.hexdigest())


def _typed(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The bytes as elements; as bytes where torch has no such type."""
    name = BY_NAME[spec.dtype].torch_name
    dtype: torch.dtype | None = getattr(torch, name, None) if name else None
    if dtype is None or raw.numel() % dtype.itemsize:
        return raw
    return raw.view(dtype)


def _count(values: torch.Tensor, into: OddValues) -> None:
    """Add what is odd about a flat run of values."""
    into.elements += values.numel()
    if values.dtype.itemsize == 1 and values.dtype.is_floating_point:
        values = values.float()  # float8 has hardly any operations
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if into.is_zero:
        into.is_zero = not bool(values.any())
    if values.is_floating_point() and not bool(values.isfinite().all()):
        into.nan += int(values.isnan().sum())
        into.inf += int(values.isinf().sum())
