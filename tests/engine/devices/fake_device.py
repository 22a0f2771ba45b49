"""A device backed by host memory that does its work late and out of order, and watches it.

Streams are queues; an operation runs when a random choice falls on its stream, or when the host
waits for an event behind it. These raise: a host buffer whose contents changed between the moment
a copy out of it was queued and the moment it ran; two operations on one staging buffer, at least
one of them writing, that no event orders (by vector clocks); and a write to fresh memory that no
event orders behind what its last owner still had queued on the caller's stream.
"""

import itertools
import random
import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from streamload.engine.lanes.moves import scatter
from streamload.engine.lanes.plain import empty_on


class HazardError(AssertionError):
    """A buffer was used before its event."""


@dataclass
class Operation:
    stream: int
    index: int
    run: object
    clock: dict


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


def place(tensor):
    return tensor.untyped_storage().data_ptr()


class FakeOps:
    """See DeviceOps.

    Args:
        seed: of the order in which things run.
        discards: keep no values, so that device memory costs nothing.
        pinned: so many times the system gives page-locked memory.
        device: as it is planned.
        eager: how likely it is that something runs while the host goes on.
    """

    stages = True

    def __init__(self, seed=0, discards=False, pinned=1 << 30, device=None, eager=0.3):
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._discards = discards
        self._pinned = pinned
        self._eager = eager
        self._bound = threading.local()
        self._maker = threading.current_thread()
        self._numbers = itertools.count()
        self._held = []  # memory that is not given out twice
        self.device = device or ("meta" if discards else "cpu")
        self._where = "meta" if discards else "cpu"
        self.all_streams = []
        self._current, *self._beside = (self._stream() for _ in range(3))
        self._known = {}  # what the host knows to be done
        self._writes, self._reads, self._owners = {}, {}, {}
        self.host_bytes = self.pageable_bytes = self.scratch_bytes = self.done = self.copies = 0
        self.reserved = []

    def bind(self):
        self._bound.here = True

    def _check_thread(self):
        """A thread of the lane's own works with its device, never with the first one there is."""
        if threading.current_thread().name.startswith("streamload-"):
            assert getattr(self._bound, "here", False), "the thread was not bound to its device"

    def free_bytes(self):
        return None

    def marks(self):
        return 0, 0

    def host(self, nbytes):
        self._check_thread()
        with self._lock:
            self._pinned -= 1
            if self._pinned < 0:
                raise RuntimeError("CUDA error: out of memory\nmore of this")
            self.host_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def pageable(self, nbytes):
        self.pageable_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def scratch(self, nbytes, stream):
        self._check_thread()
        self.scratch_bytes += nbytes
        return self._hold(torch.empty(nbytes, dtype=torch.uint8, device=self._where))

    def counters(self, count, stream):
        self._check_thread()
        return torch.zeros(count, dtype=torch.int64)

    def reserve(self, sizes):
        self.reserved.append(list(sizes))

    def allocate(self, tensor):
        made = self._hold(empty_on(tensor, self._where))
        if made.is_floating_point():
            made.fill_(float("nan"))
        if not self._discards and made.numel():
            # Its last owner let it go, but what that queued may still read it.
            held = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
            expected = held.clone()

            def run():
                if not torch.equal(held, expected):
                    raise HazardError("fresh memory was written while its last owner reads it")

            self._queue(self._current, run)
            self._owners[place(made)] = self._current.issued
        return made

    def _hold(self, tensor):
        self._held.append(tensor)
        return tensor

    def _stream(self):
        made = FakeStream(next(self._numbers))
        self.all_streams.append(made)
        return made

    def streams(self):
        return tuple(self._beside)

    def current(self):
        return self._current

    def copy(self, target, source, stream):
        self._check_thread()
        self.copies += 1
        if self._discards:
            return
        expected = source.clone()

        def run():
            if not torch.equal(source.view(torch.uint8), expected.view(torch.uint8)):
                raise HazardError("a slot was filled again before the copy out of it was over")
            target.copy_(source)

        self._queue(stream, run, writes=(target,))

    def scatter(self, moves, stream):
        self._check_thread()
        if not self._discards:
            sources = {place(move.source): move.source for move in moves}.values()

            def run():
                for move in moves:
                    scatter(move)

            self._queue(stream, run, reads=sources, targets=[move.target for move in moves])

    def record(self, stream):
        self._check_thread()
        with self._lock:
            return Event({**stream.clock, stream.number: stream.issued})

    def wait(self, stream, event):
        self._check_thread()
        with self._lock:
            merge(stream.clock, event.clock)

    def synchronize(self, event):
        self._check_thread()
        with self._lock:
            self._run_until(event.clock)
            merge(self._known, event.clock)

    def idle_streams(self):
        """Numbers of the streams that the current stream does not wait for in full."""
        clock = self.record(self._current).clock
        return [s.number for s in self.all_streams if clock.get(s.number, 0) < s.issued]

    @property
    def queued(self):
        """Operations that have not run."""
        return sum(len(stream.queue) for stream in self.all_streams)

    def _queue(self, stream, run, reads=(), writes=(), targets=()):
        with self._lock:
            stream.issued += 1
            stream.clock[stream.number] = stream.issued
            clock = dict(stream.clock)
            merge(clock, self._known)
            for tensor in (*writes, *targets):
                if clock.get(0, 0) < self._owners.get(place(tensor), 0):
                    raise HazardError("fresh memory is written before its last owner is done")
            for tensor in writes:
                if place(tensor) in self._owners:
                    continue  # parts of a destination do not lie over each other
                self._check(tensor, stream.number, clock, self._reads, self._writes)
                self._writes.setdefault(place(tensor), []).append((stream.number, stream.issued))
            for tensor in reads:
                self._check(tensor, stream.number, clock, self._writes)
                self._reads.setdefault(place(tensor), []).append((stream.number, stream.issued))
            stream.queue.append(Operation(stream.number, stream.issued, run, clock))
            while self._random.random() < self._eager and self._run_one():
                pass

    def _check(self, tensor, stream, clock, *tables):
        for table in tables:
            for other, index in table.get(place(tensor), ()):
                if other != stream and clock.get(other, 0) < index:
                    raise HazardError(f"staging is used on stream {stream} before its event")

    def _run_one(self):
        ready = [s for s in self.all_streams if s.queue and self._is_ready(s.queue[0])]
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
            self.all_streams[number].finished >= index
            for number, index in operation.clock.items()
            if number != operation.stream
        )

    def _run_until(self, clock):
        while any(self.all_streams[n].finished < i for n, i in clock.items()):
            if not self._run_one():
                raise HazardError("nothing can run, and yet not all is done")
