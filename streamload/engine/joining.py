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
    file, start, stop, nbytes = "", 0, 0, 0
    for job in jobs:
        # What is decoded is not what is read.
        is_read = job.spec.encoding is None and len(job.chunks) == len(job.extents) == 1
        here = device_of(job) if is_read else None
        if here is None:
            if held:
                yield _one(held, stop - start, nbytes)
                held = []
            yield job
            continue
        (extent,) = job.extents
        end = extent.offset + extent.nbytes
        if held and not (
            here == device
            and extent.file == file
            and stop <= extent.offset <= stop + _GAP_BYTES
            and end - start <= most_bytes
            # Its elements must lie as the buffer's do.
            and (extent.offset - start) % BY_NAME[job.spec.dtype].itemsize == 0
        ):
            yield _one(held, stop - start, nbytes)
            held = []
        if not held:
            device, file, start, nbytes = here, extent.file, extent.offset, 0
        held.append(job)
        stop = end
        nbytes += job.nbytes
    if held:
        yield _one(held, stop - start, nbytes)


def _one(jobs: list[Job], span: int, nbytes: int) -> Job:
    first = jobs[0]
    if len(jobs) == 1:
        return first
    extent = Extent(first.extents[0].file, first.extents[0].offset, span)
    return first._replace(extents=(extent,), nbytes=nbytes, parts=tuple(jobs))
