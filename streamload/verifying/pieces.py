"""What is read together: a file's ranges in order, with the digest that all of them make up."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from streamload.core.specs import Extent, TensorSpec, stored_parts
from streamload.sources.addresses import Address, content_address
from streamload.sources.base import Source

_PIECE_BYTES = 64 << 20
_FOLDERS_ABOVE = 4  # a file may lie in a subfolder of what was fetched


@dataclass(frozen=True, slots=True)
class Segment:
    """All bytes of one tensor, or bytes that are no tensor's."""

    offset: int
    nbytes: int
    spec: TensorSpec | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one worker reads in order; all of it makes up ``digest``, if there is one."""

    file: str
    segments: tuple[Segment, ...]
    digest: Address | None = None
    what: str = ""


def pieces_of(source: Source) -> Iterator[Piece]:
    """Every tensor that has bytes in a file, in pieces that workers can read side by side."""
    files: dict[str, list[Segment]] = {}
    for spec in source.catalog.tensors.values():
        if (at := spec.extent) is not None:
            files.setdefault(at.file, []).append(Segment(at.offset, at.nbytes, spec))
    sums: Mapping[Extent, int] = getattr(source, "checksums", {})
    for file, segments in files.items():
        plain, shared = _apart(segments)
        address = expected_digest(file)
        if address is not None:
            digests = {Extent(file, 0, os.path.getsize(file)): address}
        else:
            digests = {e: Address("crc32", f"{s:08x}") for e, s in sums.items() if e.file == file}
        yield from _by_digest(file, plain, digests)
        for segment in shared:
            yield Piece(file, (segment,))


def bytes_in_files(specs: Iterable[TensorSpec]) -> dict[str, int]:
    """How many bytes of each file tensors lie in; what several share counts once."""
    sizes: Counter[str] = Counter()
    ranges: dict[str, set[tuple[int, int]]] = {}
    for part in (part for spec in specs for part in stored_parts(spec)):
        if (at := part.extent) is None:
            sizes[part.file] += part.nbytes
        else:
            ranges.setdefault(at.file, set()).add((at.offset, at.offset + at.nbytes))
    for file, found in ranges.items():
        end = 0
        for begin, stop in sorted(found):
            sizes[file] += max(stop - max(begin, end), 0)
            end = max(end, stop)
    return dict(sizes)


def expected_digest(path: str) -> Address | None:
    """What a file must have by its name in a hub cache, or by the hub's note of its download."""
    return content_address(path) or _noted_at_download(path)


def _noted_at_download(path: str) -> Address | None:
    """The hub's etag of a file fetched into a folder (``--local-dir``), if it is a SHA-256.

    ``.cache/huggingface/download/NAME.metadata`` holds the commit, the etag and the time. Etags
    of small files are left alone: a config.json may be edited.
    """
    folder, name = os.path.split(os.path.abspath(path))
    for _ in range(_FOLDERS_ABOVE):
        note = os.path.join(folder, ".cache", "huggingface", "download", f"{name}.metadata")
        with suppress(OSError, ValueError), open(note, encoding="utf-8") as file:
            found = re.fullmatch(r"[^\n]*\n([0-9a-f]{64})(\n.*)?", file.read(4096), re.DOTALL)
            return Address("sha256", found[1]) if found else None
        folder, last = os.path.split(folder)
        name = os.path.join(last, name)
    return None


def _apart(segments: list[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Tensors one behind the other in the file, and those that lie across others."""
    plain: list[Segment] = []
    shared: list[Segment] = []
    end = 0
    for segment in sorted(segments, key=attrgetter("offset", "nbytes")):
        (plain if segment.offset >= end else shared).append(segment)
        end = max(end, segment.offset + segment.nbytes)
    return plain, shared


def _covering(segments: Sequence[Segment], begin: int, end: int) -> Iterator[Segment]:
    """``segments`` and what lies between them, from ``begin`` to ``end``."""
    for segment in segments:
        if segment.offset > begin:
            yield Segment(begin, segment.offset - begin)
        yield segment
        begin = segment.offset + segment.nbytes
    if end > begin:
        yield Segment(begin, end - begin)


def _by_digest(
    file: str, segments: Sequence[Segment], digests: Mapping[Extent, Address]
) -> Iterator[Piece]:
    """Ranges with a digest as they are; other tensors in pieces for several workers."""
    loose: list[Segment] = []
    inside: dict[Extent, list[Segment]] = {}
    offset = attrgetter("offset")
    extents = sorted(digests, key=offset)
    for segment in segments:
        before = bisect_right(extents, segment.offset, key=offset)
        extent = extents[before - 1] if before else None
        if extent and segment.offset + segment.nbytes <= extent.offset + extent.nbytes:
            inside.setdefault(extent, []).append(segment)
        else:
            loose.append(segment)
    for extent, tensors in inside.items():
        end = extent.offset + extent.nbytes
        names = ", ".join(repr(s.spec.name) for s in tensors if s.spec is not None)
        what = f"{file}: {names}" if digests[extent].kind == "crc32" else file
        yield Piece(file, (*_covering(tensors, extent.offset, end),), digests[extent], what)
    yield from _grouped(file, loose)


def _grouped(file: str, segments: Sequence[Segment]) -> Iterator[Piece]:
    """Tensors without a digest, so many together that several workers have work."""
    group: list[Segment] = []
    held = 0
    for segment in segments:
        group.append(segment)
        held += segment.nbytes
        if held >= _PIECE_BYTES:
            yield Piece(file, tuple(group))
            group, held = [], 0
    if group:
        yield Piece(file, tuple(group))
