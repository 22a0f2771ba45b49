"""What is left when loads end, well or badly, and where nothing should be."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import streamload
from bench.device import files
from bench.device.machine import Machine
from bench.device.rows import Row, Rows, Sizes, passed

_SLACK_BYTES = 64 << 20
_PARTS = 64


def leaks(machine: Machine, sizes: Sizes) -> Rows:
    """Memory after many loads: the device's, and the host's."""
    import psutil

    path = files.random_bits(sizes.folder, "parts", _PARTS, sizes.part_bytes)

    def once() -> None:
        streamload.load_state_dict(path, device=machine.device, dtype="float16")

    once()
    gc.collect()
    free, allocated = machine.free_bytes(), machine.allocated_bytes()
    rss = psutil.Process().memory_info().rss
    for _ in range(sizes.loads):
        once()
    gc.collect()
    grown = machine.allocated_bytes() - allocated
    yield passed(f"device memory held after {sizes.loads} loads", not grown, f"{grown} B more")
    lost = free - machine.free_bytes()
    yield passed("device memory kept by torch", lost <= _SLACK_BYTES, f"{lost >> 20} MiB more")
    more = psutil.Process().memory_info().rss - rss
    yield passed("host memory", more <= _SLACK_BYTES, f"{more >> 20} MiB more")


def failures(machine: Machine, sizes: Sizes) -> Rows:
    """Loads that cannot end well: the right error, and memory back afterwards."""
    nbytes = _PARTS * sizes.part_bytes
    path = files.random_bits(sizes.folder, "parts", _PARTS, sizes.part_bytes)
    copy = os.path.join(sizes.folder, "cut.safetensors")

    def cut(name: str) -> str:
        """Asked for names once the headers are read."""
        os.truncate(copy, nbytes // 2)
        return name

    def stop(done: int, *_: Any) -> None:
        if done:
            raise KeyError("asked to stop")

    def load(file: str = path, **options: Any) -> Any:
        return streamload.load_state_dict(
            file, device=machine.device, chunk_bytes=1 << 20, **options
        )

    shutil.copyfile(path, copy)
    yield _fails(
        machine, "a file that is cut", streamload.ReadError, lambda: load(copy, mapping=cut)
    )
    yield _fails(machine, "a callback that raises", KeyError, lambda: load(progress=stop))
    filler = machine.fill(nbytes // 2)
    refusal, worse = streamload.MemoryBudgetError, (MemoryError, RuntimeError)
    yield _fails(machine, "no memory, refused in time", refusal, load)
    yield _fails(machine, "no memory, found too late", worse, lambda: load(check_memory=False))
    del filler
    right = load()
    yield passed("a load after all of these", len(right) == _PARTS)


def two_devices(machine: Machine, sizes: Sizes) -> Rows:
    """A process that loads to the second device has nothing on the first."""
    if not machine.others:
        yield Row("a second device", "there is none")
        return
    path = files.random_bits(sizes.folder, "parts", _PARTS, sizes.part_bytes)
    streamload.load_state_dict(path, device=machine.others[0], workers=8)
    yield passed("nothing on the first device", not machine.has_context(machine.device))


def marked_tests(machine: Machine, sizes: Sizes) -> Rows:
    """The tests that need a device."""
    del machine, sizes
    yield _pytest([sys.executable], "tests marked gpu")


def sanitizer(machine: Machine, sizes: Sizes) -> Rows:
    """The same, each access to device memory watched."""
    del machine, sizes
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield Row("compute-sanitizer", "not here")
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable]
    yield _pytest(command, "compute-sanitizer memcheck")


def _pytest(python: list[str], what: str) -> Row:
    lacking = [name for name in ("pytest", "hypothesis", "tqdm") if find_spec(name) is None]
    if lacking:
        return Row(what, f"not installed: {', '.join(lacking)}")
    file = "tests/engine/test_cuda_lane.py"
    command = [*python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", file]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    found = lines[-1][:120] if lines else "said nothing"
    return passed(what, done.returncode == 0, found)


def _fails(
    machine: Machine,
    what: str,
    expected: type[BaseException] | tuple[type[BaseException], ...],
    call: Callable[[], Any],
) -> Row:
    machine.synchronize()
    before = machine.allocated_bytes()
    try:
        call()
    except expected as error:
        found = type(error).__name__
    except Exception as error:
        return Row(what, f"{type(error).__name__}: {error}"[:120], "another error", False)
    else:
        return Row(what, "no error", "an error", False)
    gc.collect()
    machine.synchronize()
    held = machine.allocated_bytes() - before
    return Row(what, f"{found}, {held} B held", "0 B held", held == 0)
