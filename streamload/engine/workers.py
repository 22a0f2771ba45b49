"""Threads that carry jobs until the queue is empty, an error stops them, or the caller does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from streamload.engine.jobs import Job, JobQueue, reader
from streamload.engine.lane import Lane, Sink
from streamload.engine.threads import use_one_torch_thread
from streamload.errors import CheckpointError
from streamload.sources.base import Source
from streamload.sources.blocks import torch_dtype
from streamload.threads import end_thread

__all__ = ["Crew"]

_POLL_S = 0.05


class Crew:
    """A number of worker threads over one queue.

    Args:
        source: read by all workers.
        lane: gives each worker its buffers.
        queue: jobs in the order they are to be done.
        sinks: destinations by number.
        done: called after each job, under no lock, from the worker.
        release: give the page cache back behind the workers.
    """

    def __init__(
        self,
        source: Source,
        lane: Lane,
        queue: JobQueue,
        sinks: Sequence[Sink],
        *,
        done: Callable[[Job], None],
        release: bool = False,
    ) -> None:
        self._source = source
        self._lane = lane
        self._queue = queue
        self._sinks = sinks
        self._done = done
        self._release = release
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def run(self, workers: int, *, tick: Callable[[], None]) -> None:
        """Work until all is done; ``tick`` is called now and then from the calling thread.

        Raises:
            Whatever a worker or ``tick`` raised, unchanged, once all workers have ended.
        """
        threads = [
            threading.Thread(target=self._work, name=f"streamload-{i}", daemon=True)
            for i in range(workers)
        ]
        begun: list[threading.Thread] = []
        try:
            for thread in threads:
                begun.append(thread)
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_POLL_S)
                    tick()
        except BaseException:
            self._stop.set()
            raise
        finally:
            for thread in begun:
                end_thread(thread)
        error, self._error = self._error, None
        if error is not None:
            raise error
        tick()

    def _work(self) -> None:
        try:
            use_one_torch_thread()
            worker = self._lane.worker()
            try:
                with torch.no_grad():
                    while not self._stop.is_set():
                        job, due = self._queue.take()
                        for extent in due:
                            self._source.prefetch(extent)
                        if job is None:
                            return
                        self._carry(job, worker)
            finally:
                worker.close()
        except BaseException as error:
            # Handed to the caller's thread, which raises it; the first one counts.
            if self._error is None:
                self._error = error
            self._stop.set()

    def _carry(self, job: Job, worker: object) -> None:
        read = reader(self._source, job.spec)
        dtype = torch_dtype(job.spec.dtype)
        try:
            for block in job.blocks:
                for part in block.parts:
                    self._sinks[part.target].touched = True
                worker.carry(block, dtype, read, self._sinks)  # type: ignore[attr-defined]
        except CheckpointError as error:
            if error.tensor is None:
                raise CheckpointError(
                    str(error), path=job.spec.file, tensor=job.spec.name
                ) from error
            raise
        if self._release and job.extent is not None:
            self._source.release(job.extent)
        self._done(job)
