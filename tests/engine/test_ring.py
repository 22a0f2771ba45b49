"""The order of reads, copies, casts and reuse, on a device that runs its work late."""

import threading

import pytest
import torch

from streamload.core.dtypes import BY_TORCH_NAME
from streamload.core.options import Settings
from streamload.engine.execute import execute
from streamload.engine.lanes.device import DeviceLane
from streamload.engine.lanes.ring import Ring
from streamload.mapping.combining import Concat, Split
from streamload.mapping.rules import NameMap, Rule
from streamload.mapping.transforms import Transpose
from streamload.planning.build import build_plan
from streamload.sources.in_memory import MemorySource
from tests.engine.fake_device import FakeOps, HazardError

RULES = NameMap(
    (
        Rule("plain.{layer}", "plain.{layer}"),
        Rule("turned.{layer}", "turned.{layer}", Transpose()),
        Rule(("q.{layer}", "k.{layer}"), "qk.{layer}", Concat(0)),
        Rule("both.{layer}", ("left.{layer}", "right.{layer}"), Split(1)),
        Rule("flags", "flags"),
        Rule("ids", "ids"),
        Rule("one", "one"),
        Rule("none", "none"),
    ),
    layers=3,
)


def stored_tensors(seed):
    made = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        tensors[f"plain.{layer}"] = torch.randn(37, 29, generator=made)
        tensors[f"turned.{layer}"] = torch.randn(41, 23, generator=made)
        tensors[f"q.{layer}"] = torch.randn(8, 31, generator=made)
        tensors[f"k.{layer}"] = torch.randn(5, 31, generator=made)
        tensors[f"both.{layer}"] = torch.randn(19, 26, generator=made)
    tensors["flags"] = torch.rand(901, generator=made) > 0.5
    tensors["ids"] = torch.arange(777)
    tensors["one"] = torch.tensor(3.5)
    tensors["none"] = torch.empty(0, 4)
    return tensors


def expected_tensors(stored, dtype):
    made = {name: stored[name] for name in ("flags", "ids", "one", "none")}
    for layer in range(3):
        made[f"plain.{layer}"] = stored[f"plain.{layer}"]
        made[f"turned.{layer}"] = stored[f"turned.{layer}"].t()
        made[f"qk.{layer}"] = torch.cat([stored[f"q.{layer}"], stored[f"k.{layer}"]])
        made[f"left.{layer}"], made[f"right.{layer}"] = stored[f"both.{layer}"].chunk(2, 1)
    return {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in made.items()}


def run(ops, stored, *, dtype=None, slots=1, slot_bytes=256, workers=8, chunk_bytes=512):
    source = MemorySource(stored)
    options = Settings(
        dtype=None if dtype is None else BY_TORCH_NAME[str(dtype).removeprefix("torch.")],
        workers=workers,
        chunk_bytes=chunk_bytes,
        staging_bytes=1024,
    )
    plan = build_plan(source.catalog, RULES, None, options)
    plan.raise_if_refused()
    return execute(plan, source, DeviceLane(ops, slots=slots, slot_bytes=slot_bytes))


@pytest.mark.parametrize("seed", range(50))
def test_every_tensor_is_right_with_the_smallest_ring_and_eight_readers(seed):
    stored = stored_tensors(seed)
    dtype = (None, torch.bfloat16, torch.float16)[seed % 3]
    ops = FakeOps(seed)
    found = run(ops, stored, dtype=dtype, slots=1 + seed % 2 * seed % 3).tensors
    expected = expected_tensors(stored, dtype)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert ops.done > 100


@pytest.mark.parametrize("forgotten", ["host", "copying", "computing"])
def test_a_missing_wait_is_caught(forgotten):
    caught = 0
    for seed in range(6):
        stored = stored_tensors(seed)
        try:
            found = run(FakeOps(seed, forget=(forgotten,)), stored, dtype=torch.bfloat16).tensors
        except HazardError:
            caught += 1
        else:
            expected = expected_tensors(stored, torch.bfloat16)
            caught += not all(torch.equal(found[n], t) for n, t in expected.items())
    assert caught == 6


@pytest.mark.parametrize(("forgotten", "is_caught"), [((), False), (("current",), True)])
def test_the_current_stream_waits_for_everything(forgotten, is_caught):
    ops = FakeOps(forget=forgotten)
    run(ops, stored_tensors(0), dtype=torch.bfloat16)
    assert bool(ops.idle_streams()) == is_caught


def test_values_that_overflow_are_counted_on_the_device():
    stored = stored_tensors(0)
    stored["turned.1"][3, 4] = 1e6
    stored["turned.1"][5, 5] = -1e6
    stored["plain.0"][0, 0] = 1e30
    stored["plain.0"][0, 1] = float("inf")  # not finite to begin with
    notices = run(FakeOps(), stored, dtype=torch.float16).notices
    assert sorted(notices) == [
        "'plain.0': 1 finite values overflow F16",
        "'turned.1': 2 finite values overflow F16",
    ]


def test_values_cut_to_the_largest_are_counted_on_the_device():
    stored = stored_tensors(0)
    stored["plain.0"][0, :3] = torch.tensor([449.0, -1e4, float("inf")])
    stored["turned.0"][2, 1] = 1e30
    notices = run(FakeOps(), stored, dtype=torch.float8_e4m3fn).notices
    assert sorted(notices) == [
        "'plain.0': 2 finite values overflow F8_E4M3",
        "'turned.0': 1 finite values overflow F8_E4M3",
    ]


def test_the_ring_is_all_the_host_memory_there_is():
    for rows in (64, 64 * 40):
        ops = FakeOps(discards=True)
        stored = {"plain.0": torch.zeros(rows, 64), "turned.0": torch.zeros(rows, 64)}
        source = MemorySource(stored)
        plan = build_plan(source.catalog, RULES, None, Settings(workers=8, chunk_bytes=8192))
        execute(plan, source, DeviceLane(ops, slots=4, slot_bytes=4096))
        assert 4096 <= ops.host_bytes <= 4 * 4096


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
