"""What a load to devices takes, of theirs and of the host's memory, as planned."""

import pytest

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import MemoryBudgetError
from streamload.core.options import SLOT_BYTES, Settings, settings_from
from streamload.core.specs import Catalog, Extent, TensorSpec
from streamload.loading.budget import check_memory
from streamload.mapping.rules import NameMap, Rule
from streamload.mapping.transforms import Transpose
from streamload.planning.build import build_plan
from streamload.planning.needed_memory import PANELS, device_bytes, ring_of
from streamload.system.memory import available_memory

MIB = 1 << 20


def planned(shapes, rules=None, **options):
    """A plan of float32 tensors of these shapes, and its device's memory."""
    specs, at = {}, 0
    for name, (rows, width) in shapes.items():
        nbytes = 4 * rows * width
        specs[name] = TensorSpec(name, "F32", (rows, width), "f", Extent("f", at, nbytes))
        at += nbytes
    settings = settings_from(options)
    plan = build_plan(Catalog(specs), rules, None, settings)
    plan.raise_if_refused()
    return plan, device_bytes(plan.tensors, plan.stored, settings)


class TestRing:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"workers": 1}, (12, 16 * MIB)),
            ({"workers": 8}, (12, 16 * MIB)),
            ({"workers": 16}, (20, 16 * MIB)),  # no reader waits for a slot
            ({"workers": 32}, (36, 16 * MIB)),
            ({"workers": 8, "ring_bytes": 48 * MIB}, (12, 4 * MIB)),
            ({"workers": 8, "ring_bytes": 50 * MIB}, (12, 4 * MIB)),
            ({"workers": 8, "ring_bytes": 1 << 40}, (12, 16 * MIB)),
            ({"workers": 8, "ring_bytes": 200_000}, (3, 65536)),
            ({"workers": 8, "ring_bytes": 1}, (1, 65536)),
            ({"workers": 8, "chunk_bytes": MIB}, (12, MIB)),
            ({"workers": 8, "chunk_bytes": 3 * MIB}, (12, 2 * MIB)),
        ],
    )
    def test_slots_and_their_size(self, options, expected):
        assert ring_of(settings_from({"device": "cuda", **options})) == expected

    @pytest.mark.parametrize("workers", [1, 3, 8, 16, 40])
    @pytest.mark.parametrize("ring_bytes", [1 << 16, 5 * MIB, 100 * MIB, 192 * MIB, 1 << 30])
    def test_the_budget_holds(self, workers, ring_bytes):
        slots, size = ring_of(Settings(workers=workers, ring_bytes=ring_bytes, chunk_bytes=1 << 30))
        assert slots * size <= ring_bytes
        assert size & (size - 1) == 0  # page-locked memory is rounded up to a power of two

    def test_more_readers_by_default_than_for_the_host(self, monkeypatch):
        monkeypatch.setattr("streamload.core.options.usable_cpus", lambda: 64)
        assert settings_from({}).workers == 8
        assert settings_from({"device": "cuda"}).workers == 16


class TestHostMemory:
    def test_one_ring_for_each_device(self):
        shapes = {f"{n}.{i}": (4096, 4096) for n in "abc" for i in range(8)}
        ring = 12 * SLOT_BYTES
        options = {"workers": 2, "dtype": "bfloat16"}
        one, _ = planned(shapes, device="cuda:0", **options)
        assert one.memory.needed_bytes == one.memory.staging_bytes
        assert one.memory.staging_bytes == ring
        three = {"a": "cuda:0", "b": "cuda:1", "c": "cuda:2"}
        assert planned(shapes, device=three, **options)[0].memory.staging_bytes == 3 * ring

    def test_a_small_load_takes_no_more_than_goes_through(self):
        plan, _ = planned({"a": (10, 10)}, device="cuda:0")
        assert plan.memory.staging_bytes == SLOT_BYTES


class TestDeviceMemory:
    def test_tensors_and_panels(self):
        _, found = planned({"a": (100, 100), "b": (1, 1)}, device="cuda:0")
        assert found == {"cuda:0": 40448 + 512 + PANELS * SLOT_BYTES}

    def test_counting_overflows_takes_room_beside_the_panels(self):
        shapes = {"a": (4096, 4096)}
        plain = planned(shapes, device="cuda:0")[1]["cuda:0"]
        cast = planned(shapes, device="cuda:0", dtype="float16")[1]["cuda:0"]
        assert cast == plain - 2 * 4096 * 4096 + 2 * SLOT_BYTES

    def test_a_row_longer_than_a_panel_has_one_of_its_own(self):
        shapes, rules = {"a": (2, 10 * MIB)}, NameMap((Rule("a", "a", Transpose()),))
        plain = planned(shapes, device="cuda:0")[1]["cuda:0"]
        turned = planned(shapes, rules, device="cuda:0")[1]["cuda:0"]
        assert turned == plain + 4 * 10 * MIB

    def test_what_is_counted_is_what_refuses(self):
        plan, found = planned({"a": (4096, 4096)}, device="cuda:0")
        there = available_memory()
        memory = {"available_bytes": there.bytes, "limit": there.limit}
        object.__setattr__(plan, "memory", type(plan.memory)(**memory))
        check_memory(plan, {"cuda:0": found["cuda:0"]})
        with pytest.raises(MemoryBudgetError, match="on cuda:0"):
            check_memory(plan, {"cuda:0": found["cuda:0"] - 1})

    def test_int8_weights_wait_in_full_beside_a_panel(self):
        from dataclasses import replace

        from streamload.module.quantizing import quantizing_bytes

        plan, _ = planned({f"h.{i}.w": (8192, 4096) for i in range(4)}, device="cuda:0")
        layered = tuple(replace(t, layer=i) for i, t in enumerate(plan.tensors))
        plan = replace(plan, tensors=layered, quantized=frozenset(t.name for t in layered))
        weight = 8192 * 4096
        found = quantizing_bytes(plan, "cuda:0")
        assert found == 2 * 4 * weight + 4 * (16 << 20) + 4 * 5 * 8192
        int8 = device_bytes(plan.tensors, plan.stored, plan.options, plan.quantized)["cuda:0"]
        assert int8 == 4 * weight + PANELS * SLOT_BYTES
        assert BY_NAME["F32"].itemsize == 4
