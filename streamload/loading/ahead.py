"""What a load will need, begun from the headers while torch is still being imported.

The command line waits for that import for a second or more, with a processor and the disk idle.
A thread reads ahead what is not in the page cache, makes the pages of mapped weights present, and
makes memory for weights that will be cast: all of it what the load does anyway, only earlier.
Nothing here decides anything: what was guessed wrong is let go. No torch import.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from streamload.core.dtypes import BY_NAME, parse_dtype
from streamload.core.specs import Extent, TensorSpec, numel
from streamload.mapping.choose import choose_binding
from streamload.mapping.transforms import Transpose
from streamload.sources.base import Source
from streamload.sources.detect import open_checkpoint
from streamload.sources.files import OpenFile
from streamload.sources.hub import folder_of
from streamload.sources.remote.urls import is_url
from streamload.system.filesystems import reason_to_read
from streamload.system.mappings import offer_mapping, withdraw_mappings
from streamload.system.memory import available_memory
from streamload.system.pages import made_ahead, note_ahead, offer_pages, populate, withdraw_pages

# After each piece the thread looks whether it is to stop.
_PIECE_BYTES = 8 << 20
# Where less than this is left beside all of it, nothing is done ahead.
_LEAST_ROOM_BYTES = 512 << 20
_PATIENCE_S = 1.0
# Options under which a load does not simply read this file to this machine's memory.
_OTHERWISE = ("cache", "quantize", "layers", "prefix", "layout", "adapter")


class _Needs(NamedTuple):
    """What a load will read, which of it stays mapped, and the sizes of the tensors it makes."""

    read: list[Extent]
    mapped: list[Extent]
    made: list[int]


@contextmanager
def ahead_of_load(path: str, options: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs (an import), do what the load of ``path`` will need first.

    Call ``let_go`` once the load is over.
    """
    stop = threading.Event()
    thread = threading.Thread(
        target=_work, args=(path, options, stop), name="streamload-ahead", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_PATIENCE_S)  # a disk or a file system may be slow to answer


def let_go() -> None:
    """What was made ahead and not used goes back to the system."""
    withdraw_pages()
    withdraw_mappings()
    made_ahead()


def _work(path: str, options: Mapping[str, Any], stop: threading.Event) -> None:
    # Whatever is wrong with the checkpoint or the options, the load will say.
    with suppress(Exception), ExitStack() as opened:
        if not _is_quickly_read(path):
            return
        source = opened.enter_context(open_checkpoint(path))
        needs = _needs(source, options)
        total = sum(needs.made) + sum(extent.nbytes for extent in needs.read)
        if total + _LEAST_ROOM_BYTES > available_memory().bytes:
            return
        if stop.is_set():
            return
        paths = {extent.file for extent in needs.read}
        files = {file: opened.enter_context(OpenFile(file)) for file in sorted(paths)}
        for extent in _pieces(needs.read, stop):
            files[extent.file].advise(extent.offset, extent.nbytes, needed=True)
        _map_ahead(files, needs.mapped, stop)
        for nbytes in needs.made:
            if stop.is_set():
                return
            memory = offer_pages(nbytes)
            if memory is None:
                continue
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            for at in range(0, nbytes, _PIECE_BYTES):
                if not stop.is_set():
                    piece_bytes = min(_PIECE_BYTES, nbytes - at)
                    populate(start + at, piece_bytes)
                    note_ahead(anonymous_bytes=piece_bytes)


def _is_quickly_read(path: str) -> bool:
    """True for safetensors, whose headers take milliseconds; others would delay the import."""
    if is_url(path):
        return False
    path = folder_of(path)
    names = os.listdir(path) if os.path.isdir(path) else [path]
    return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


def _map_ahead(files: Mapping[str, OpenFile], extents: list[Extent], stop: threading.Event) -> None:
    bases: dict[str, int] = {}
    kinds: dict[int, str] = {}
    for path in dict.fromkeys(extent.file for extent in extents):
        with files[path].descriptor() as descriptor:
            if reason_to_read(path, descriptor, kinds):
                return
            base = None if stop.is_set() else offer_mapping(descriptor)
        if base is not None:
            bases[path] = base
    for extent in _pieces(extents, stop):
        if extent.file in bases:
            populate(bases[extent.file] + extent.offset, extent.nbytes, to_read=True)
            note_ahead(file_bytes=extent.nbytes)


def _pieces(extents: list[Extent], stop: threading.Event) -> Iterator[Extent]:
    for extent in extents:
        for at in range(0, extent.nbytes, _PIECE_BYTES):
            if stop.is_set():
                return
            nbytes = min(_PIECE_BYTES, extent.nbytes - at)
            yield Extent(extent.file, extent.offset + at, nbytes)


def _needs(source: Source, options: Mapping[str, Any]) -> _Needs:
    needs = _Needs([], [], [])
    if options.get("device", "cpu") != "cpu" or any(options.get(name) for name in _OTHERWISE):
        return needs
    config, _ = source.config()
    _, binding = choose_binding(config, source.catalog, None)
    wanted, mode = parse_dtype(options.get("dtype")), options.get("mode") or "auto"
    for assignment in binding.assignments:
        specs = [source.catalog[name] for name in assignment.sources]
        needs.read.extend(spec.extent for spec in specs if spec.extent is not None)
        is_turned = isinstance(assignment.transform, Transpose)
        (spec,) = specs if len(specs) == 1 else (None,)
        if spec is not None and spec.extent is not None and len(assignment.targets) == 1:
            dtype = spec.dtype
            if wanted is not None and BY_NAME[dtype].is_floating:
                dtype = wanted.name
            # In half the width, transposed matrices are copied.
            is_slow = mode == "auto" and is_turned and BY_NAME[dtype].itemsize < 4
            if dtype != spec.dtype or mode == "stream" or is_slow:
                needs.made.append(numel(spec.shape) * BY_NAME[dtype].itemsize)
            elif assignment.layer is not None and _is_mappable(source, spec):
                needs.mapped.append(spec.extent)
    return needs


def _is_mappable(source: Source, spec: TensorSpec) -> bool:
    is_aligned = spec.extent is not None and not spec.extent.offset % BY_NAME[spec.dtype].itemsize
    return source.is_replaced_whole and is_aligned
