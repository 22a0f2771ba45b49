"""A device backed by host memory that does its work late and out of order, and watches it.

Streams are queues; an operation runs when a random choice falls on its stream, or when the host
waits for an event behind it. Two things raise: a host buffer whose contents changed between the
moment a copy out of it was queued and the moment it ran, and two operations on one staging
buffer, at least one of them writing, that no event orders (by vector clocks).
"""

import itertools
import random
import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from streamload.engine.lanes.device import empty_on, scatter


class HazardError(AssertionError):
    """A buffer was used before its event."""


@dataclass
class Operation:
    stream: int
    index: int
    run: object
    clock: dict
    waits: tuple = ()


@dataclass
class Event:
    clock: dict


@dataclass
class FakeStream:
    number: int
    queue: deque = field(default_factory=deque)
    issued: int = 0
    finished: int = 0
    clock: dict = field(default_factory=dict)


def merge(into, other):
    for stream, index in other.items():
        into[stream] = max(into.get(stream, 0), index)


class FakeOps:
    """See DeviceOps.

    Args:
        seed: of the order in which things run.
        forget: ``"host"``, ``"copying"``, ``"computing"`` or ``"current"``: waits of this kind
            are left out, as a fault.
        discards: keep no values, so that device memory costs nothing.
    """

    def __init__(self, seed=0, forget=(), discards=False):
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._forget = forget
        self._discards = discards
        self._numbers = itertools.count()
        self._names = {}
        self.streams = []
        self._current = self.stream("current")
        self._known = {}  # what the host knows to be done
        self._writes, self._reads = {}, {}
        self.host_bytes = 0
        self.scratch_bytes = 0
        self.done = 0

    def free_bytes(self):
        return None

    def marks(self):
        return 0, 0

    def host(self, nbytes):
        self.host_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def scratch(self, nbytes, stream):
        self.scratch_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def counter(self, stream):
        return torch.zeros((), dtype=torch.int64)

    def allocate(self, tensor):
        made = empty_on(tensor, self.device)
        if made.is_floating_point():
            made.fill_(float("nan"))
        return made

    @property
    def device(self):
        return "meta" if self._discards else "cpu"

    def stream(self, name=None):
        made = FakeStream(next(self._numbers))
        self._names[made.number] = name or ("copying", "computing")[(made.number - 1) % 2]
        self.streams.append(made)
        return made

    def current(self):
        return self._current

    def copy(self, target, source, stream):
        if self._discards:
            return
        expected = source.clone()

        def run():
            if not torch.equal(source.view(torch.uint8), expected.view(torch.uint8)):
                raise HazardError("a slot was filled again before the copy out of it was over")
            target.copy_(source)

        self._queue(stream, run, writes=(target,))

    def scatter(self, source, part, target, lost, stream):
        if not self._discards:
            run = lambda: scatter(source, part, target, lost)  # noqa: E731
            self._queue(stream, run, reads=(source,))

    def record(self, stream):
        with self._lock:
            return Event({**stream.clock, stream.number: stream.issued})

    def wait(self, stream, event):
        with self._lock:
            if self._names[stream.number] not in self._forget:
                merge(stream.clock, event.clock)

    def synchronize(self, event):
        if "host" in self._forget:
            return
        with self._lock:
            self._run_until(event.clock)
            merge(self._known, event.clock)

    def idle_streams(self):
        """Numbers of the streams that the current stream does not wait for in full."""
        clock = self.record(self._current).clock
        return [s.number for s in self.streams if clock.get(s.number, 0) < s.issued]

    def _queue(self, stream, run, reads=(), writes=()):
        with self._lock:
            stream.issued += 1
            stream.clock[stream.number] = stream.issued
            clock = dict(stream.clock)
            merge(clock, self._known)
            for tensor in writes:
                key = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
                self._check(key, stream.number, clock, self._reads, self._writes)
                self._writes.setdefault(key[0], []).append((stream.number, stream.issued))
            for tensor in reads:
                key = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
                self._check(key, stream.number, clock, self._writes)
                self._reads.setdefault(key[0], []).append((stream.number, stream.issued))
            stream.queue.append(Operation(stream.number, stream.issued, run, clock))
            while self._random.random() < 0.3 and self._run_one():
                pass

    def _check(self, key, stream, clock, *tables):
        for table in tables:
            for other, index in table.get(key[0], ()):
                if other != stream and clock.get(other, 0) < index:
                    raise HazardError(f"staging is used on stream {stream} before its event")

    def _run_one(self):
        ready = [s for s in self.streams if s.queue and self._is_ready(s.queue[0])]
        if not ready:
            return False
        stream = self._random.choice(ready)
        operation = stream.queue.popleft()
        operation.run()
        stream.finished = operation.index
        self.done += 1
        return True

    def _is_ready(self, operation):
        return all(
            self.streams[number].finished >= index
            for number, index in operation.clock.items()
            if number != operation.stream
        )

    def _run_until(self, clock):
        while any(self.streams[n].finished < i for n, i in clock.items()):
            if not self._run_one():
                raise HazardError("nothing can run, and yet not all is done")
