"""Casts are torch's own, bit for bit; what overflows is counted, exactly, or refused."""

import itertools

import pytest
import torch

import streamload
from streamload import MemorySource, NameMap, Rule, Split, Transpose
from streamload.core.options import Settings
from streamload.engine.casts import can_overflow, count_overflows
from streamload.engine.execute import execute
from streamload.engine.lanes.cpu import CpuLane
from streamload.planning.build import build_plan
from tests.support.tiny import bag, same_bits, write

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2]
INF, NAN = float("inf"), float("nan")
EDGES = [
    0.0, -0.0, 1.0, -1.0, 1e-8, -1e-8, 6e-8, 1e-40, 0.1, 1 / 3, 1.00390625, 2049.0, 65504.0,
    65519.9, 65520.0, -65520.0, 3.3895e38, 3.4e38, -3.4028e38, 448.0, 464.0, 57344.0,
    INF, -INF, NAN,
]  # fmt: skip


def equal(one, two):
    """Same bits, any NaN for a NaN."""
    if one.dtype.itemsize == 1:
        one, two = one.float(), two.float()
    both = torch.isnan(one) & torch.isnan(two)
    return (
        one.dtype == two.dtype
        and bool(((one == two) | both).all())
        and torch.equal(torch.signbit(one)[~both], torch.signbit(two)[~both])
    )


@pytest.mark.parametrize("chunk_bytes", [1, 8, 12, 64, None])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("stored", "asked"), [*itertools.product(FLOATS, FLOATS), *itertools.product(EIGHT, FLOATS)]
)
def test_to_is_the_judge(tmp_path, stored, asked, chunk_bytes, workers):
    tensors = {
        "edges": torch.tensor(EDGES, dtype=torch.float64).to(stored),
        "matrix": torch.linspace(-3, 3, 35).reshape(5, 7).to(stored),
        "empty": torch.zeros(0, 4).to(stored),
        "scalar": torch.tensor(1 / 3).to(stored),
    }
    path = write(tmp_path / "x.safetensors", tensors)
    found = streamload.load_state_dict(path, dtype=asked, chunk_bytes=chunk_bytes, workers=workers)
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        if stored == asked:
            assert same_bits(found[name], tensor)
        else:
            assert equal(found[name], tensor.to(asked))


@pytest.mark.parametrize("asked", FLOATS)
def test_nothing_but_floats_is_cast(tmp_path, asked):
    tensors = {
        "ids": torch.tensor([0, 40000, 70001]),
        "tracked": torch.tensor(16777217),
        "mask": torch.tensor([True, False]),
        "codes": torch.tensor([200, 3], dtype=torch.uint8),
        "small": torch.tensor([-128, 127], dtype=torch.int8),
        "wave": torch.tensor([1 - 2j]),
    }
    path = write(tmp_path / "x.safetensors", tensors)
    for found in (
        streamload.load_state_dict(path, dtype=asked),
        dict(streamload.iter_tensors(path, dtype=asked)),
    ):
        assert all(same_bits(found[name], t) for name, t in tensors.items())


def test_without_a_request_every_tensor_keeps_its_own(tmp_path):
    tensors = {f"t{i}": torch.ones(2, dtype=dtype) for i, dtype in enumerate(FLOATS)}
    for order in itertools.permutations(tensors):
        path = write(tmp_path / "x.safetensors", {name: tensors[name] for name in order})
        found = streamload.load_state_dict(path)
        assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in tensors.items()}


def expected_overflows(tensor, dtype):
    wide = tensor.double()
    lost = ~torch.isfinite(tensor.to(dtype).double())
    if dtype == torch.float8_e4m3fn:  # torch gives 448 for all that is larger
        lost |= wide.abs() > 448
    return int((torch.isfinite(wide) & lost).sum())


class TestOverflow:
    @pytest.fixture
    def path(self, tmp_path):
        hot = torch.full((64, 64), 1.0)
        hot[::7, ::3] = 70000.0
        hot[0, 1], hot[1, 1] = INF, NAN  # were so before
        self.hot = hot
        return write(
            tmp_path / "x.safetensors", {"hot": hot, "cold": torch.full((64, 64), 60000.0)}
        )

    @pytest.mark.parametrize("chunk_bytes", [4, 100, 4096, None])
    @pytest.mark.parametrize("workers", [1, 4])
    @pytest.mark.parametrize("turned", [False, True])
    def test_the_count_is_exact_and_told_by_tensor(self, path, chunk_bytes, workers, turned):
        module = bag({"hot": (64, 64), "cold": (64, 64)})
        table = NameMap((Rule("hot", "hot", Transpose() if turned else None), Rule("cold", "cold")))
        report = streamload.load_into(
            module, path, mapping=table, dtype="float16", chunk_bytes=chunk_bytes, workers=workers
        )
        count = expected_overflows(self.hot, torch.float16)
        assert [n for n in report.notices if "overflow" in n] == [
            f"'hot': {count} finite values overflow F16"
        ]
        wanted = self.hot.to(torch.float16)
        assert equal(module.hot.detach(), wanted.t() if turned else wanted)

    @pytest.mark.parametrize("workers", [1, 4])
    @pytest.mark.parametrize("turned", [False, True])
    def test_what_is_cut_to_the_largest_value_is_told_too(self, path, workers, turned):
        module = bag({"hot": (64, 64), "cold": (64, 64)})
        table = NameMap((Rule("hot", "hot", Transpose() if turned else None), Rule("cold", "cold")))
        options = {"mapping": table, "dtype": "float8_e4m3fn", "workers": workers}
        with pytest.raises(streamload.StreamloadError, match=r"'(hot|cold)'.*overflow"):
            streamload.load_into(module, path, overflow="refuse", **options)
        report = streamload.load_into(module, path, chunk_bytes=100, **options)
        count = expected_overflows(self.hot, torch.float8_e4m3fn)
        assert sorted(n for n in report.notices if "overflow" in n) == [
            f"'cold': {64 * 64} finite values overflow F8_E4M3",
            f"'hot': {count} finite values overflow F8_E4M3",
        ]
        assert float(module.cold.detach().float().max()) == 448

    def test_refusing_leaves_the_module_alone(self, path):
        module = bag({"hot": (64, 64), "cold": (64, 64)})
        with pytest.raises(streamload.StreamloadError, match=r"x\.safetensors: 'hot'.*overflow"):
            streamload.load_into(module, path, dtype="float16", overflow="refuse")
        assert all(p.is_meta for p in module.parameters())
        assert streamload.load_into(module, path, dtype="bfloat16", overflow="refuse").ok

    @pytest.mark.parametrize("stored", FLOATS + EIGHT)
    @pytest.mark.parametrize("target", FLOATS + EIGHT)
    def test_counts_for_every_pair_of_types(self, stored, target):
        edges = torch.tensor(EDGES, dtype=torch.float64).to(stored)
        cast = edges.to(target)
        lost = expected_overflows(edges, target)
        if lost:
            assert can_overflow(stored, target)
        if can_overflow(stored, target):
            assert count_overflows(edges, cast) == lost

    def test_many_values_that_merely_add_up_to_infinity_are_none(self):
        values = torch.full((4096,), 60000.0)
        assert count_overflows(values, values.half()) == 0


def test_one_source_for_targets_of_two_dtypes_is_rounded_once():
    """A staged panel must not pass one target's values through the other's narrower type."""
    w = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    from streamload import Chain

    table = NameMap((Rule("w", ("a", "b"), Chain(Transpose(), Split(0))),))
    module = bag({"a": (4, 6)}, device="cpu", dtype=torch.bfloat16)
    module.register_parameter("b", torch.nn.Parameter(torch.zeros(4, 6)))
    from streamload.module.targets import existing_tensors, targets_of

    source = MemorySource({"w": w})
    plan = build_plan(source.catalog, table, targets_of(module), Settings(staging_bytes=64))
    plan.raise_if_refused()
    execute(plan, source, CpuLane(chunk_bytes=16), existing=existing_tensors(module, plan))
    assert same_bits(module.a.detach(), w.t()[:4].bfloat16())
    assert same_bits(module.b.detach(), w.t()[4:].contiguous())
