"""A device that does nothing: what is left is the lane's own work, and the host's memory.

    python -m tests.engine.devices.null_device overhead TENSORS WORKERS   # of 4 KiB each
    python -m tests.engine.devices.null_device memory GIB WORKERS         # peak, read from outside

``overhead`` prints microseconds for each tensor, wall clock and this process's CPU, the planning
left out. ``memory`` loads a file of holes, and prints how much more the process held at its peak
than before the load.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time

import torch

from streamload.core.options import settings_from
from streamload.core.specs import TensorSpec
from streamload.engine.execute import execute
from streamload.engine.lanes.device import DeviceLane
from streamload.engine.lanes.plain import empty_on
from streamload.planning.build import build_plan
from streamload.planning.needed_memory import ring_of
from streamload.saving.file_layout import lay_out
from streamload.sources.detect import open_layers
from streamload.system.peaks import StatusReader


class NullOps:
    """See DeviceOps."""

    device = "null:0"
    stages = True

    def bind(self):
        pass

    def free_bytes(self):
        return None

    def marks(self):
        return 0, 0

    def host(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    pageable = host

    def scratch(self, nbytes, stream):
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def counters(self, count, stream):
        return torch.zeros(count, dtype=torch.int64)

    def reserve(self, sizes):
        pass

    def allocate(self, tensor):
        return empty_on(tensor, "meta")

    def streams(self):
        return None, None

    def current(self):
        pass

    def copy(self, target, source, stream):
        pass

    def scatter(self, moves, stream):
        pass

    def record(self, stream):
        pass

    def wait(self, stream, event):
        pass

    def synchronize(self, event):
        pass


def load(path, workers, begin=lambda: None, **options):
    """Load a file to the null device; ``begin`` is called once the plan is made."""
    settings = settings_from({"device": NullOps.device, "workers": workers, **options})
    with open_layers(path, None, None) as source:
        plan = build_plan(source.catalog, None, None, settings, source=path)
        plan.raise_if_refused()
        slots, slot_bytes = ring_of(settings)
        begin()
        execute(plan, source, DeviceLane(NullOps(), slots=slots, slot_bytes=slot_bytes))
    return settings


def holes(folder, count, rows, width):
    """A file of ``count`` float32 matrices that takes no space on disk."""
    specs = [TensorSpec(f"layers.{i}.weight", "F32", (rows, width), "") for i in range(count)]
    path = os.path.join(folder, f"{count}-{rows}-{width}.safetensors")
    (layout,) = lay_out(specs, path)
    with open(path, "wb") as file:
        file.write(layout.header)
        file.truncate(layout.nbytes)
    return path


def overhead(path, count, workers):
    """(wall, CPU) seconds of a load, its plan left out."""
    start = []

    def begin():
        start.extend((time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime))

    load(path, workers, begin)
    spent = resource.getrusage(resource.RUSAGE_SELF).ru_utime - start[1]
    return time.perf_counter() - start[0], spent


def peak_bytes(path, workers, **options):
    """Anonymous memory of a process at its peak over what it held before it began the load."""
    child = (
        "import sys; from tests.engine.devices.null_device import load\n"
        "def begin(): print('ready', flush=True); sys.stdin.readline()\n"
        f"load({path!r}, {workers}, begin, **{options!r})\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        with StatusReader(process.pid) as status:
            start = most = status.read().anonymous
            process.stdin.write("\n")
            process.stdin.flush()
            while process.poll() is None:
                most = max(most, status.read().anonymous)
                time.sleep(0.001)
    assert process.returncode == 0
    return most - start


def main(what, size, workers):
    with tempfile.TemporaryDirectory() as folder:
        if what == "overhead":
            path = holes(folder, int(size), 1, 1024)
            wall, spent = (s / int(size) * 1e6 for s in overhead(path, int(size), int(workers)))
            print(f"{size} tensors, {workers} workers: {wall:.1f} us wall, {spent:.1f} us CPU each")
        else:
            path = holes(folder, int(float(size) * 64), 1024, 4096)
            peak = peak_bytes(path, int(workers))
            print(f"{size} GiB, {workers} workers: {peak >> 20} MiB of host memory at the peak")


if __name__ == "__main__":
    main(*sys.argv[1:4])
