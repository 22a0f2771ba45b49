"""Joins jobs that are neighbours in a file, so that they are read and copied at once.

A device likes few large copies, and files of many small tensors hold them one after the other:
100,000 tensors of 4 KiB are 25 reads of 16 MiB. Pure arithmetic, as all of planning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from streamload.core.dtypes import BY_NAME
from streamload.core.specs import Extent
from streamload.engine.jobs import Job

# Bytes between two tensors (zip headers, padding) that are read and thrown away.
_GAP_BYTES = 4096


def joined(
    jobs: Iterable[Job], most_bytes: int, device_of: Callable[[Job], str | None]
) -> Iterator[Job]:
    """The same work in the same order, neighbours as one job.

    Args:
        jobs: in the order of the files.
        most_bytes: that are read at once.
        device_of: the one device a job writes to; None if its read cannot be shared.
    """
    held: list[Job] = []
    device: str | None = None
    file, start, stop = "", 0, 0
    for job in jobs:
        extent = job.run
        here = None if extent is None or len(job.chunks) != 1 else device_of(job)
        if extent is None or here is None:
            if held:
                yield _one(held, stop - start)
                held = []
            yield job
            continue
        end = extent.offset + extent.nbytes
        if held and not (
            here == device
            and extent.file == file
            and stop <= extent.offset <= stop + _GAP_BYTES
            and end - start <= most_bytes
            # Its elements must lie as the buffer's do.
            and (extent.offset - start) % BY_NAME[job.spec.dtype].itemsize == 0
        ):
            yield _one(held, stop - start)
            held = []
        if not held:
            device, file, start = here, extent.file, extent.offset
        held.append(job)
        stop = end
    if held:
        yield _one(held, stop - start)


def _one(jobs: list[Job], span: int) -> Job:
    first = jobs[0]
    if len(jobs) == 1:
        return first
    assert first.run is not None, "only reads from files are joined"
    extent = Extent(first.run.file, first.run.offset, span)
    wanted = sum(job.nbytes - job.unwanted_bytes for job in jobs)
    return first._replace(
        extents=(extent,), nbytes=span, unwanted_bytes=span - wanted, parts=tuple(jobs)
    )
