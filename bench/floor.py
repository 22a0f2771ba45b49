"""The physical floor of a load on this machine, with as many workers as the loaders get.

Threads ``preadv`` blocks of 4 MiB into one reused buffer each and, for the second figure, cast
them into fresh memory with torch. Nothing is planned, checked, named or transposed.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.job import Job

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Block:
    """Bytes ``[offset, offset + nbytes)`` of the tensor called ``name``."""

    name: str
    offset: int
    nbytes: int


def read_only(job: Job) -> dict[str, Any]:
    """Reads everything, keeps nothing."""
    _each_block(job, lambda *_: None)
    return {}


def read_and_cast(job: Job) -> dict[str, Any]:
    """Reads everything into new tensors of the job's dtype."""
    import torch

    entries = job.entries
    made = {}
    for name, entry in entries.items():
        stored = entry.torch_dtype()
        wanted = job.torch_dtype() if stored.is_floating_point else None
        made[name] = torch.empty(entry.shape, dtype=wanted or stored)
    flat = {name: tensor.view(-1) for name, tensor in made.items()}
    types = {name: entry.torch_dtype() for name, entry in entries.items()}

    def keep(block: Block, buffer: Any) -> None:
        stored = types[block.name]
        start, count = block.offset // stored.itemsize, block.nbytes // stored.itemsize
        values = buffer[: block.nbytes].view(stored)
        flat[block.name][start : start + count].copy_(values)

    _each_block(job, keep)
    return made


def _each_block(job: Job, use: Callable[[Block, Any], None]) -> None:
    import torch

    entries = job.entries
    files = {file: os.open(file, os.O_RDONLY) for file in job.files}
    blocks: queue.SimpleQueue[Block] = queue.SimpleQueue()
    for name, entry in entries.items():
        for start in range(0, entry.nbytes, BLOCK_BYTES):
            blocks.put(Block(name, start, min(BLOCK_BYTES, entry.nbytes - start)))
    failures: list[BaseException] = []

    def work() -> None:
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        memory = buffer.numpy().data
        while not failures:
            try:
                block = blocks.get_nowait()
            except queue.Empty:
                return
            try:
                entry = entries[block.name]
                _read(files[entry.file], memory[: block.nbytes], entry.offset + block.offset)
                use(block, buffer)
            except (OSError, RuntimeError, MemoryError) as error:
                failures.append(error)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        threads = [threading.Thread(target=work) for _ in range(job.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
        for fd in files.values():
            os.close(fd)
    if failures:
        raise failures[0]


def _read(fd: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], offset + done)
        if count == 0:
            raise EOFError("the file ended early")
        done += count
