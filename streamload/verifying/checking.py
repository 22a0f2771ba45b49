"""Reads every byte of a checkpoint once: odd values are counted, digests compared."""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Protocol

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.options import Progress, Settings
from streamload.core.specs import Extent, TensorSpec
from streamload.decoding.scratch import Buffer
from streamload.engine.threads import use_one_torch_thread
from streamload.sources.addresses import Address
from streamload.sources.base import Source
from streamload.sources.blocks import bytes_of
from streamload.sources.files import OpenFile
from streamload.sources.hub import folder_of
from streamload.verifying.pieces import Piece, Segment, bytes_in_files, expected_digest, pieces_of
from streamload.verifying.verify_report import DigestCheck, OddValues, VerifyReport

_TICK_S = 0.1


def check(source: Source, settings: Settings, *, progress: Progress | None = None) -> VerifyReport:
    """Read everything once.

    Args:
        source: an open checkpoint.
        settings: ``workers`` and ``chunk_bytes`` are used.
        progress: called as progress(done_bytes, total_bytes, file), from this thread.

    Raises:
        ReadError: reading failed, or a file was changed meanwhile.
    """
    reading = _Reading(source, settings.chunk_bytes)
    pieces = [*pieces_of(source)]
    total = sum(s.nbytes for piece in pieces for s in piece.segments)
    with ThreadPoolExecutor(settings.workers, initializer=use_one_torch_thread) as pool:
        left = {pool.submit(reading.read, piece, source.read_into) for piece in pieces}
        try:
            while left:
                done, left = wait(left, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if progress is not None:
                    progress(reading.bytes_read, total, reading.at)
        except BaseException:
            reading.stop.set()
            source.interrupt()
            raise
    for spec in source.catalog.tensors.values():
        if spec.extent is None:  # only a source can make its values, and not in parallel
            _count(source.tensor(spec.name).reshape(-1), reading.values[spec.name])
            reading.bytes_read += spec.nbytes
    source.check_unchanged()
    bytes_read = reading.bytes_read
    _read_small_files(source, reading)
    values = reading.values.values()
    return VerifyReport(
        tensors=len(values),
        non_finite=tuple(v for v in values if v.nan or v.inf),
        all_zero=tuple(v.name for v in values if v.is_zero and v.elements),
        digests=tuple(sorted(reading.digests, key=lambda digest: digest.what)),
        notices=source.catalog.notices,
        files=bytes_in_files(source.catalog.tensors.values()),
        bytes_read=bytes_read,
    )


class _Reading:
    """What the workers have found so far; ``values`` are by stored name."""

    def __init__(self, source: Source, chunk_bytes: int) -> None:
        self.values = {name: OddValues(name) for name in source.catalog}
        self.digests: list[DigestCheck] = []
        self.bytes_read = 0
        self.at = ""
        self.stop = threading.Event()
        self._chunk_bytes = max(chunk_bytes // 16 * 16, 16)
        self._lock = threading.Lock()

    def read(self, piece: Piece, read_into: Callable[..., None]) -> None:
        """Read a piece from start to end."""
        digest = _digest(piece.digest, sum(s.nbytes for s in piece.segments))
        buffer = Buffer()
        self.at = piece.file
        for segment in piece.segments:
            name = segment.spec.name if segment.spec else None
            for start in range(0, segment.nbytes, self._chunk_bytes):
                if self.stop.is_set():
                    return
                size = min(self._chunk_bytes, segment.nbytes - start)
                raw = buffer.elements(size, torch.uint8)
                read_into(
                    Extent(piece.file, segment.offset + start, size), bytes_of(raw), tensor=name
                )
                if segment.spec is not None:
                    # Tensors that lie apart are read by one worker each: no lock is needed.
                    _count(_typed(raw, segment.spec), self.values[segment.spec.name])
                if digest is not None:
                    digest.update(bytes_of(raw))
                with self._lock:
                    self.bytes_read += size
        if piece.digest is not None and digest is not None:
            found = digest.hexdigest()
            check = DigestCheck(piece.what, piece.digest.kind, piece.digest.digest, found)
            with self._lock:
                self.digests.append(check)


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


def _digest(address: Address | None, nbytes: int) -> _Digest | None:
    if address is None:
        return None
    if address.kind == "crc32":
        return _Crc()
    if address.kind == "git-sha1":
        return hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)
    return hashlib.sha256()


def _read_small_files(source: Source, reading: _Reading) -> None:
    """The other files of a snapshot or a download: configuration, tokenizer, index."""
    if source.is_remote:  # no digests are told there, and no folder is listed
        return
    folder = folder_of(source.path)
    weights = {os.path.realpath(spec.file) for spec in source.catalog.tensors.values()}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        address = expected_digest(path)
        if address is None or os.path.realpath(path) in weights or not os.path.isfile(path):
            continue
        with OpenFile(path) as file:

            def read_into(extent: Extent, buffer: memoryview, *, tensor: str | None) -> None:
                file.read_into(extent.offset, buffer, tensor=tensor)

            reading.read(Piece(path, (Segment(0, file.size_bytes),), address, path), read_into)


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
