"""Threads that carry jobs until the queue is empty, an error stops them, or the caller does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from streamload.core.errors import CheckpointError
from streamload.engine.gaps import RowReader
from streamload.engine.groups import GroupFeed
from streamload.engine.jobs import Job, JobQueue
from streamload.engine.lanes.base import Destinations, Lane, LaneWorker
from streamload.engine.threads import use_one_torch_thread
from streamload.sources.base import Source
from streamload.sources.blocks import torch_dtype
from streamload.sources.wrapping.reader import Reader
from streamload.system.thread_end import end_thread

_POLL_S = 0.05


class WorkerPool:
    """A number of worker threads over one queue.

    Args:
        source: read by all workers.
        lane: gives each worker its buffers.
        queue: jobs in the order they are to be done.
        feed: asked before each job, which must have memory, and told after it.
        release: give the page cache back behind the workers.
    """

    def __init__(
        self,
        source: Source,
        lane: Lane,
        queue: JobQueue,
        feed: GroupFeed,
        *,
        release: bool = False,
    ) -> None:
        self._source = source
        self._lane = lane
        self._queue = queue
        self._feed = feed
        self._release = release
        self._stop = threading.Event()
        self._news = threading.Condition()
        self._has_news = False
        self._at_work = 0
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
        self._at_work = workers
        try:
            for thread in threads:
                begun.append(thread)
                thread.start()
            while self._wait_for_news():
                tick()
        except BaseException:
            self._halt()
            raise
        finally:
            for thread in begun:
                end_thread(thread)
            self._settle(begun)
        error, self._error = self._error, None
        if error is not None:
            raise error
        tick()

    def _wait_for_news(self) -> bool:
        """True after a moment, or as soon as there is something to do; False at the end."""
        with self._news:
            self._news.wait_for(lambda: self._has_news or not self._at_work, _POLL_S)
            self._has_news = False
            return self._at_work > 0

    def _settle(self, begun: Sequence[threading.Thread]) -> None:
        """Nothing may be under way when memory goes back, whatever happened."""
        if not begun:
            return
        try:
            self._lane.settle()
        except BaseException as error:
            # A device that failed says so to whoever asks it next; the first one counts.
            self._error = self._error or error

    def _halt(self) -> None:
        self._stop.set()
        self._source.interrupt()
        self._feed.stop()

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
                        if job is None or not self._feed.admit(job):
                            return
                        send(job, self._source, worker, self._feed.destinations)
                        for extent in job.extents if self._release else ():
                            self._source.release(extent)
                        if self._feed.done(job):
                            self._tell()
            finally:
                worker.close()
        except BaseException as error:
            # Handed to the caller's thread, which raises it; the first one counts.
            if self._error is None:
                self._error = error
            self._halt()
        finally:
            with self._news:
                self._at_work -= 1
                self._news.notify()

    def _tell(self) -> None:
        with self._news:
            self._has_news = True
            self._news.notify()


def send(job: Job, source: Source, worker: LaneWorker, destinations: Destinations) -> None:
    """Have a job's chunks read and written by the calling thread's worker.

    Raises:
        ReadError, CheckpointError: with file and tensor.
    """
    if job.parts:
        for one in job.parts:
            for part in one.chunks[0].parts:
                destinations[part.target].touched = True
        worker.carry_joined(job, source, destinations)
        return
    read = Reader(source, job.spec, worker.scratch)
    dtype = torch_dtype(job.spec.dtype)
    try:
        for chunk in job.chunks:
            for part in chunk.parts:
                destinations[part.target].touched = True
            of = read if chunk.rows is None else RowReader(read, chunk.rows, dtype.itemsize)
            worker.carry(chunk, dtype, of, destinations)
    except CheckpointError as error:
        if error.tensor is None:
            raise CheckpointError(str(error), path=job.spec.file, tensor=job.spec.name) from error
        raise
