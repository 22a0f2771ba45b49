"""How fast: the bus and the reader apart, then loads by workers, many tensors, and peers."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import streamload
from bench.device import files
from bench.device.machine import Machine
from bench.device.rows import Row, Rows, Sizes, gb_per_s
from bench.job import Job
from streamload.core.options import SLOT_BYTES
from streamload.measuring import floor, page_cache

_LEAST_SHARE = 0.9


def ceilings(machine: Machine, sizes: Sizes) -> Rows:
    """What the bus carries and what readers bring, each alone."""
    nbytes = sizes.file_bytes
    for pinned in (True, False):
        kind = "pinned" if pinned else "pageable"
        for piece in (1 << 20, SLOT_BYTES):
            seconds = machine.copy_s(nbytes, piece, pinned=pinned)
            yield Row(f"copy to the device, {kind}, {piece >> 20} MiB", gb_per_s(nbytes, seconds))
    path = _large(sizes)
    page_cache.warm([path])
    for workers in sizes.workers:
        yield Row(f"reading, warm, {workers} readers", gb_per_s(nbytes, _reading_s(path, workers)))
    workers = sizes.workers[-1]
    for direct in (False, True):
        why = page_cache.drop([path])
        kind = "O_DIRECT" if direct else "buffered"
        try:
            seconds = _direct_s(path, workers) if direct else _reading_s(path, workers)
        except OSError as error:
            yield Row(f"reading, cold, {kind}", f"not here: {error}")
            continue
        yield Row(
            f"reading, cold, {kind}", gb_per_s(nbytes, seconds) + (f" ({why})" if why else "")
        )


def bandwidth(machine: Machine, sizes: Sizes) -> Rows:
    """Loads by workers and by the ring's size, against the lower of the two ceilings."""
    path, nbytes = _large(sizes), sizes.file_bytes
    page_cache.warm([path])
    bus = nbytes / machine.copy_s(nbytes, SLOT_BYTES, pinned=True)
    ceiling = min(bus, max(nbytes / _reading_s(path, w) for w in sizes.workers[-2:]))
    best = 0.0
    for workers in sizes.workers:
        seconds = min(_load_s(machine, path, workers=workers) for _ in range(2))
        best = max(best, nbytes / seconds)
        yield Row(f"load, warm, {workers} workers", gb_per_s(nbytes, seconds))
    for slots in (2, 4, 8, 24):
        seconds = _load_s(machine, path, workers=8, ring_bytes=slots * SLOT_BYTES)
        yield Row(
            f"load, warm, a ring of {slots * SLOT_BYTES >> 20} MiB", gb_per_s(nbytes, seconds)
        )
    share = best / ceiling
    yield Row("best load of the lower ceiling", f"{share:.0%}", "90%", share >= _LEAST_SHARE)
    why = page_cache.drop([path])
    seconds = _load_s(machine, path)
    yield Row("load, cold", gb_per_s(nbytes, seconds) + (f" ({why})" if why else ""))


def many(machine: Machine, sizes: Sizes) -> Rows:
    """Many tensors: what each costs beside its bytes."""
    for count, each in ((sizes.small, 4 << 10), (sizes.experts, 3 << 20)):
        path = files.random_bits(sizes.folder, f"{count}-of-{each}", count, each)
        page_cache.warm([path])
        for workers in (1, 8):
            seconds = min(_load_s(machine, path, workers=workers) for _ in range(2))
            found = f"{seconds / count * 1e6:.1f} us each, {gb_per_s(count * each, seconds)}"
            yield Row(f"{count} tensors of {each >> 10} KiB, {workers} workers", found)


def peers(machine: Machine, sizes: Sizes) -> Rows:
    """Other loaders of the same file to the same device, if they are installed; warm, best of 2."""
    path, nbytes = _large(sizes), sizes.file_bytes
    page_cache.warm([path])
    own_s = min(_load_s(machine, path) for _ in range(2))
    yield Row("streamload", gb_per_s(nbytes, own_s))
    for name, load in PEERS.items():
        try:
            call = partial(load, path, machine.device)
            seconds = min(_timed(machine, call) for _ in range(2))
        except ImportError:
            yield Row(name, "not installed")
            continue
        except Exception as error:  # a peer's fault is its own row
            yield Row(name, f"failed: {error}"[:120])
            continue
        is_ahead = own_s < seconds
        yield Row(name, gb_per_s(nbytes, seconds), "slower than streamload", is_ahead)


def _safetensors(path: str, device: str) -> Any:
    from safetensors.torch import load_file

    return load_file(path, device=device)


def _safetensors_pread(path: str, device: str) -> Any:
    from safetensors.torch import load_file

    return load_file(path, device=device, backend="pread")


def _safetensors_prefetch(path: str, device: str) -> Any:
    """The whole file is asked for first, as its own prefetching does where it has some."""
    from safetensors.torch import load_file

    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    return load_file(path, device=device)


def _fastsafetensors(path: str, device: str) -> Any:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=[path], nogds=True, device=device, debug_log=False) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def _instanttensor(path: str, device: str) -> Any:
    from instanttensor import safe_open

    with safe_open(path, framework="pt", device=int(device.partition(":")[2] or 0)) as file:
        return {name: tensor.clone() for name, tensor in file.tensors()}


PEERS: dict[str, Callable[[str, str], Any]] = {
    "safetensors load_file": _safetensors,
    "safetensors load_file, pread": _safetensors_pread,
    "safetensors load_file, prefetched": _safetensors_prefetch,
    "fastsafetensors": _fastsafetensors,
    "InstantTensor": _instanttensor,
}


def _large(sizes: Sizes) -> str:
    each = min(64 << 20, sizes.file_bytes)
    return files.random_bits(sizes.folder, "large", sizes.file_bytes // each, each)


def _load_s(machine: Machine, path: str, **options: Any) -> float:
    return _timed(
        machine, lambda: streamload.load_state_dict(path, device=machine.device, **options)
    )


def _timed(machine: Machine, call: Callable[[], Any]) -> float:
    """Seconds until everything is there; what was made is let go outside of them."""
    gc.collect()
    machine.synchronize()
    start_s = time.perf_counter()
    made = call()
    machine.synchronize()
    seconds = time.perf_counter() - start_s
    del made
    return seconds


def _reading_s(path: str, workers: int) -> float:
    pieces = Job(path, None, workers).pieces
    start_s = time.perf_counter()
    floor.read_only(pieces, workers=workers)
    return time.perf_counter() - start_s


def _direct_s(path: str, workers: int) -> float:
    """Seconds to read the file past the page cache, in blocks of 16 MiB."""
    import mmap

    size = os.path.getsize(path)
    turns = iter(range(0, size, SLOT_BYTES))
    lock, failures = threading.Lock(), []

    def work() -> None:
        try:
            with mmap.mmap(-1, SLOT_BYTES) as buffer:  # on a page, as the disk wants it
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
                try:
                    while True:
                        with lock:
                            start = next(turns, None)
                        if start is None:
                            return
                        os.preadv(descriptor, [buffer], start)
                finally:
                    os.close(descriptor)
        except OSError as error:
            failures.append(error)

    start_s = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - start_s
