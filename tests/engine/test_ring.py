"""Slots and panels, what is counted, and what a load keeps of memory; the order of it all is
checked by ``test_waits``."""

import gc
import math
import sys
import threading
import time
import weakref
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import CheckpointError, ReadError, StreamloadError
from streamload.core.options import Settings
from streamload.core.specs import Extent, contiguous_strides
from streamload.engine.chunks import Part
from streamload.engine.execute import execute
from streamload.engine.lanes.device import DeviceLane
from streamload.engine.lanes.moves import scatter, scatter_all
from streamload.engine.lanes.ring import Move, Ring
from streamload.planning.build import build_plan
from streamload.sources.in_memory import MemorySource
from tests.engine.devices import null_device
from tests.engine.devices.fake_device import FakeOps
from tests.engine.devices.rounds import DEVICE, RULES, OneFile, load, stored_tensors


def on_device(source, ops, *, slots=3, slot_bytes=1 << 14, rules=None, **options):
    """All of a source's tensors through a lane on ``ops``."""
    plan = build_plan(source.catalog, rules, None, Settings(device=DEVICE, **options))
    return execute(plan, source, DeviceLane(ops, slots=slots, slot_bytes=slot_bytes))


def test_values_that_overflow_are_counted_on_the_device():
    stored = stored_tensors(0)
    stored["turned.1"][3, 4] = 1e6
    stored["turned.1"][5, 5] = -1e6
    stored["plain.0"][0, 0] = 1e30
    stored["plain.0"][0, 1] = float("inf")  # not finite to begin with
    notices = load(FakeOps(device=DEVICE), stored, dtype=torch.float16).notices
    assert sorted(notices) == [
        "'plain.0': 1 finite values overflow F16",
        "'turned.1': 2 finite values overflow F16",
    ]


def test_values_cut_to_the_largest_are_counted_on_the_device():
    stored = stored_tensors(0)
    stored["plain.0"][0, :3] = torch.tensor([449.0, -1e4, float("inf")])
    stored["turned.0"][2, 1] = 1e30
    notices = load(FakeOps(device=DEVICE), stored, dtype=torch.float8_e4m3fn).notices
    assert sorted(notices) == [
        "'plain.0': 2 finite values overflow F8_E4M3",
        "'turned.0': 1 finite values overflow F8_E4M3",
    ]


@pytest.mark.parametrize("turn", range(20))
def test_no_overflow_is_dropped_while_a_reader_is_still_queueing(turn):
    """The other readers are at their end long before the last one has cast anything."""

    class Slow(FakeOps):
        def scatter(self, moves, stream):
            if any(move.part.shape == (41, 23) for move in moves):
                time.sleep(0.01)
            super().scatter(moves, stream)

    stored = stored_tensors(turn)
    stored["turned.2"][:, 3] = 1e30
    sizes = {"slots": 12, "slot_bytes": 8192, "chunk_bytes": 8192, "workers": 8}
    ops = Slow(turn, device=DEVICE)
    with pytest.raises(StreamloadError, match=r"'turned\.2': 41 finite values overflow F16"):
        load(ops, stored, dtype=torch.float16, overflow="refuse", **sizes)


@pytest.mark.parametrize("seed", range(6))
def test_memory_that_is_overwritten_in_place_goes_the_same_way(seed):
    class Noting(FakeOps):
        def scatter(self, moves, stream):
            super().scatter(moves, stream)
            targets.update(move.target.data_ptr() for move in moves)

    targets = set()
    stored = {f"w.{i}": torch.randn(40, 3) for i in range(9)}
    existing = {n: (torch.zeros_like(t, dtype=torch.bfloat16),) for n, t in stored.items()}
    source, ops = OneFile(stored), Noting(seed, device=DEVICE)
    plan = build_plan(source.catalog, None, None, Settings(device=DEVICE, dtype=BY_NAME["BF16"]))
    plan = replace(plan, tensors=tuple(replace(t, is_new=False) for t in plan.tensors))
    with patch.object(torch.autograd.graph, "increment_version"):
        execute(plan, source, DeviceLane(ops, slots=2, slot_bytes=1024), existing=existing)
    assert targets == {tensor.data_ptr() for (tensor,) in existing.values()}
    assert ops.host_bytes <= 2 * 1024
    for name, (tensor,) in existing.items():
        assert torch.equal(tensor, stored[name].bfloat16()), name


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.half)])
def test_runs_that_go_together_are_written_as_if_alone(dtypes):
    """What CUDA does with a batch, on memory of the host's."""
    stored, target = dtypes
    source = torch.randn(64).to(stored)
    shapes = [((5,), (1,)), ((3, 4), (4, 1)), ((4, 3), (1, 4)), ((7,), (1,)), ((1,), (1,))]
    moves, alone, at = [], [], 0
    for shape, strides in shapes:
        count = math.prod(shape)
        part = Part(0, shape, strides, 0, contiguous_strides(shape), 2)
        for made in (moves, alone):
            made.append(Move(source, at, part, torch.zeros(count + 3, dtype=target), None))
        at += count
    moves.append(Move(source, 0, moves[0].part, torch.zeros(9, dtype=torch.float64), None))
    alone.append(Move(source, 0, moves[0].part, torch.zeros(9, dtype=torch.float64), None))
    scatter_all(moves)
    for move, other in zip(moves, alone, strict=True):
        scatter(other)
        assert torch.equal(move.target, other.target)
        assert move.target.any()


class TestJoinedReads:
    def test_neighbours_are_one_read_and_one_copy(self):
        stored = {f"w.{i}": torch.full((64,), float(i)) for i in range(1000)}
        source, ops = OneFile(stored), FakeOps(device=DEVICE)
        found = on_device(source, ops).tensors
        assert len(source.reads) == ops.copies == -(-1000 * 256 // (1 << 14))
        assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())

    @pytest.mark.parametrize(("gap", "reads"), [(0, 1), (120, 1), (5000, 6)])
    def test_small_gaps_are_read_along(self, gap, reads):
        stored = {f"w.{i}": torch.full((3,), float(i)) for i in range(6)}
        source = OneFile(stored, gap=gap)
        done = on_device(source, FakeOps(device=DEVICE))
        assert len(source.reads) == reads
        between = 5 * gap if reads == 1 else 0
        assert (done.bytes_read, done.bytes_unwanted) == (6 * 12 + between, between)
        assert all(torch.equal(done.tensors[n], t) for n, t in stored.items())

    def test_elements_that_lie_askew_are_read_apart(self):
        stored = {"a": torch.tensor([7, 8, 9], dtype=torch.uint8), "b": torch.arange(5.0)}
        source = OneFile(stored)
        specs = dict(source.catalog.tensors)
        extent = Extent(source.path, 1, 3)  # "b" begins 3 bytes after it
        specs["a"] = replace(specs["a"], extent=extent)
        source.catalog = replace(source.catalog, tensors=specs)
        source._bytes[1:4] = bytes([7, 8, 9])
        found = on_device(source, FakeOps(device=DEVICE)).tensors
        assert all(torch.equal(found[n], t) for n, t in stored.items())
        assert len(source.reads) == 2

    def test_an_error_names_the_tensor_it_is_in(self):
        class Cut(OneFile):
            def read_into(self, extent, buffer, *, tensor=None):
                if extent.offset + extent.nbytes > 30:
                    raise ReadError("the file ended early", path=self.path, tensor=tensor, errno=5)
                super().read_into(extent, buffer, tensor=tensor)

        source = Cut({f"w.{i}": torch.full((3,), float(i)) for i in range(6)})
        with pytest.raises(ReadError) as caught:
            on_device(source, FakeOps(device=DEVICE))
        assert caught.value.tensor == "w.2"

    def test_odd_bytes_of_a_bool_are_refused_by_name(self):
        source = OneFile({name: torch.ones(4, dtype=torch.bool) for name in "ab"})
        source._bytes[6] = 7
        with pytest.raises(CheckpointError) as caught:
            on_device(source, FakeOps(device=DEVICE))
        assert (caught.value.path, caught.value.tensor) == (source.path, "b")


class TestMemory:
    def test_the_ring_is_all_the_host_memory_there_is(self):
        for rows in (64, 64 * 40):
            stored = {"plain.0": torch.zeros(rows, 64), "turned.0": torch.zeros(rows, 64)}
            ops = FakeOps(discards=True, device=DEVICE)
            on_device(MemorySource(stored), ops, slots=4, slot_bytes=4096, rules=RULES)
            assert 4096 <= ops.host_bytes <= 4 * 4096

    def test_staging_is_bounded_and_long_rows_have_one_panel_of_their_own(self):
        stored = {"turned.0": torch.zeros(40, 64), "turned.1": torch.zeros(9, 5000)}
        ops = FakeOps(discards=True, device=DEVICE)
        on_device(MemorySource(stored), ops, slots=16, slot_bytes=4096, rules=RULES, workers=8)
        assert ops.host_bytes <= 16 * 4096
        assert ops.scratch_bytes <= 4 * 4096 + 5000 * 4 + 16

    def test_a_panel_that_grows_lets_the_smaller_one_go_first(self):
        live, most = [], []

        class Watching(FakeOps):
            def _hold(self, tensor):
                return tensor

            def scratch(self, nbytes, stream):
                most.append(sum(live) + nbytes)
                made = super().scratch(nbytes, stream)
                live.append(nbytes)
                weakref.finalize(made, live.remove, nbytes)
                return made

        stored = {f"turned.{i}": torch.zeros(3, 2000 * (i + 1)) for i in range(3)}
        ops = Watching(discards=True, device=DEVICE)
        on_device(MemorySource(stored), ops, slots=1, slot_bytes=64, rules=RULES, workers=1)
        assert most == [8000, 16000, 24000]

    def test_new_memory_is_asked_for_once(self):
        stored = stored_tensors(0)
        ops = FakeOps(device=DEVICE)
        load(ops, stored)
        (sizes,) = ops.reserved
        assert sum(sizes) == sum(t.nbytes for t in stored.values())

    def test_without_page_locked_memory_it_goes_on_and_says_so(self):
        stored = stored_tensors(0)
        ops = FakeOps(device=DEVICE, pinned=1)
        done = load(ops, stored, slots=4)
        assert ops.host_bytes == 256
        assert ops.pageable_bytes == 3 * 256
        (notice,) = done.notices
        assert "no page-locked memory" in notice
        assert "CUDA error: out of memory" in notice
        assert "more of this" not in notice

    def test_ring_and_staging_go_with_the_load(self):
        """Without waiting for the garbage collector, which may be far from its next turn."""
        made = []

        class Watching(FakeOps):
            def _hold(self, tensor):
                return tensor

            def host(self, nbytes):
                made.append(weakref.ref(slot := super().host(nbytes)))
                return slot

            def scratch(self, nbytes, stream):
                made.append(weakref.ref(panel := super().scratch(nbytes, stream)))
                return panel

        gc.disable()
        try:
            load(Watching(device=DEVICE), stored_tensors(0), dtype=torch.float16, slots=4)
            assert len(made) > 4
            assert not [ref for ref in made if ref() is not None]
        finally:
            gc.enable()

    def test_nothing_is_under_way_when_a_load_has_failed(self):
        class Broken(OneFile):
            def read_into(self, extent, buffer, *, tensor=None):
                if extent.offset > 8000:
                    raise ReadError("broken", path=self.path, tensor=tensor, errno=5)
                super().read_into(extent, buffer, tensor=tensor)

        stored = stored_tensors(0)
        ops = FakeOps(device=DEVICE, eager=0.0)
        with pytest.raises(ReadError, match="broken"):
            load(ops, stored, source=Broken(stored), slots=8)
        assert ops.done
        assert not ops.queued


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("shape", [(8, 1024, 4096), (4000, 4, 256)])
def test_host_memory_is_the_ring_and_little_more_read_from_outside(tmp_path, shape):
    path = null_device.holes(str(tmp_path), *shape)
    peak = null_device.peak_bytes(path, 2, ring_bytes=24 << 20)
    assert peak < (24 << 20) + (64 << 20)


class TestRing:
    def test_slots_go_round_the_longest_free_first(self):
        made = []
        ring = Ring(2, lambda: made.append(1) or torch.empty(1))
        slots = []
        for _ in range(4):
            slots.append(ring.take())
            ring.give(slots[-1])
        assert len(made) == 2
        assert slots[0] is slots[2] is not slots[1] is slots[3]

    def test_taking_waits_for_giving(self):
        ring = Ring(1, lambda: torch.empty(1))
        slot = ring.take()
        taken = []
        thread = threading.Thread(target=lambda: taken.append(ring.take()))
        thread.start()
        thread.join(0.05)
        assert not taken
        ring.give(slot)
        thread.join(5)
        assert taken == [slot]

    def test_a_slot_that_could_not_be_made_can_be_tried_again(self):
        fails = [True]

        def make():
            if fails.pop() if fails else False:
                raise MemoryError
            return torch.empty(1)

        ring = Ring(1, make)
        with pytest.raises(MemoryError):
            ring.take()
        assert ring.take().buffer.numel() == 1
