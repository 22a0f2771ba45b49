"""Sums and means of partitions, of every type: as torch has them in a wider one, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import streamload
from streamload import CheckpointError, Mean, MemorySource, NameMap, Rule, StreamloadError, Sum
from streamload.core.dtypes import BY_NAME
from streamload.core.options import Settings
from streamload.engine.arithmetic import gaps
from streamload.engine.execute import execute
from streamload.engine.lanes.cpu import CpuLane
from streamload.engine.output_chunks import batches, execute_chunks
from streamload.module.targets import existing_tensors, targets_of
from streamload.planning.build import build_plan
from tests.support.tiny import same_bits

DTYPES = [getattr(torch, d.torch_name) for d in BY_NAME.values() if d.torch_name]
WHOLE = [d for d in DTYPES if not (d.is_floating_point or d.is_complex or d == torch.bool)]
FLOATS = [d for d in DTYPES if d.is_floating_point and d.itemsize > 1]
PARTIAL = [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]
NAMES = ("a", "b", "c")


def reduced(transform, parts, *, into=None, **options):
    """The one tensor that comes of the parts, and what is noticed; ``into`` is overwritten."""
    names = NAMES[: len(parts)]
    source = MemorySource(dict(zip(names, parts, strict=True)))
    table = NameMap((Rule(names, ("x",), transform),))
    module = None
    if into is not None:
        module = nn.Module()
        module.register_buffer("x", into)
    targets = None if module is None else targets_of(module)
    plan = build_plan(source.catalog, table, targets, Settings(**options))
    plan.raise_if_refused()
    existing = {} if module is None else existing_tensors(module, plan)
    run = execute(plan, source, CpuLane(chunk_bytes=16), existing=existing)
    return run.tensors.get("x", into), run.notices


def value(*arguments, **options):
    return reduced(*arguments, **options)[0]


def whole(dtype, *values):
    return torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype)


def random(dtype, seed):
    g = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(3, 5, dtype=dtype, generator=g)
    return torch.randn(3, 5, generator=g, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [*PARTIAL, *COMPLEX], ids=str)
def test_sums_and_means_are_torchs_in_a_wider_type(dtype, count):
    parts = [random(dtype, seed) for seed in range(count)]
    wide = dtype if dtype.is_complex or dtype == torch.float64 else torch.float32
    total = torch.stack([part.to(wide) for part in parts]).sum(0)
    assert same_bits(value(Sum(), parts), total.to(dtype))
    mean = value(Mean(), parts, replicas="average")
    assert same_bits(mean, (total / count).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_two_parts_are_rounded_once(dtype):
    parts = [random(dtype, seed) for seed in (1, 2)]
    assert same_bits(value(Sum(), parts), (parts[0].double() + parts[1].double()).to(dtype))


def test_float64_keeps_all_of_its_bits():
    parts = [torch.tensor([1.0 + 2**-50], dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    assert value(Sum(), parts).item() == 2.0 + 2**-50
    assert value(Sum(), [parts[0], torch.ones(1)]).item() == 2.0 + 2**-50
    assert value(Sum(), [torch.ones(1), parts[0].half().float()]).dtype == torch.float32


def test_imaginary_parts_are_added_and_compared():
    parts = [torch.tensor([1 + 2j]), torch.tensor([1 + 3j])]
    assert value(Sum(), parts).item() == 2 + 5j
    with pytest.raises(CheckpointError, match=r"largest difference 1,"):
        value(Mean(), parts)
    assert value(Mean(), parts, replicas="average").item() == 1 + 2.5j


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
class TestIntegers:
    def test_exact_up_to_the_last_value(self, dtype):
        info = torch.iinfo(dtype)
        parts = [whole(dtype, info.max - 3, info.min, 1), whole(dtype, 3, 0, 1)]
        assert value(Sum(), parts).tolist() == [info.max, info.min, 2]

    def test_passing_through_what_does_not_fit(self, dtype):
        info = torch.iinfo(dtype)
        if info.min:
            parts = [whole(dtype, info.max), whole(dtype, info.max), whole(dtype, info.min)]
            assert value(Sum(), parts).tolist() == [info.max - 1]

    @pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
    def test_overflow_is_refused_before_anything_is_written(self, dtype, in_place):
        info = torch.iinfo(dtype)
        parts = [whole(dtype, info.max, 1), whole(dtype, 1, 1)]
        kept = whole(dtype, 5, 5)
        message = rf"sum of the partitions of 'x'.*: 1 results do not fit {str(dtype)[6:]}"
        with pytest.raises(CheckpointError, match=message):
            value(Sum(), parts, into=kept if in_place else None)
        assert kept.tolist() == [5, 5]
        if info.min:
            with pytest.raises(CheckpointError, match="do not fit"):
                value(Sum(), [whole(dtype, info.min), whole(dtype, -1)])

    def test_means(self, dtype):
        info = torch.iinfo(dtype)
        same = whole(dtype, info.max, info.min, 7)
        assert same_bits(value(Mean(), [same, same.clone(), same.clone()]), same)
        near = whole(dtype, info.max - 1, info.min, 7)
        with pytest.raises(CheckpointError, match=r"must agree.*largest difference 1,"):
            value(Mean(), [same, near])
        with pytest.raises(CheckpointError, match="mean is not whole"):
            value(Mean(), [same, near], replicas="average")
        two = whole(dtype, info.max - 2, info.min, 7)
        averaged = value(Mean(), [same, two], replicas="average")
        assert averaged.tolist() == [info.max - 1, info.min, 7]


@pytest.mark.parametrize("transform", [Sum(), Mean()])
def test_booleans_are_refused_while_planning(transform):
    parts = [torch.tensor([True]), torch.tensor([True])]
    with pytest.raises(streamload.PlanError, match=r"'x'.*booleans have no (sum|mean)"):
        value(transform, parts)


@pytest.mark.parametrize("other", [torch.int32, torch.complex64, torch.bool, torch.uint8], ids=str)
def test_kinds_are_not_mixed(other):
    with pytest.raises(streamload.PlanError, match="parts are stored as"):
        value(Sum(), [torch.ones(1), torch.ones(1, dtype=other)])


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_a_sum_that_becomes_infinite_is_an_overflow(dtype):
    most = torch.finfo(dtype).max
    parts = [torch.tensor([most, 1], dtype=dtype), torch.tensor([most, 1], dtype=dtype)]
    kept = torch.ones(2, dtype=dtype)
    for way in (
        lambda: value(Sum(), parts, overflow="refuse"),
        lambda: value(Sum(), parts, into=kept, overflow="refuse"),
    ):
        with pytest.raises(StreamloadError, match="'x': 1 finite values overflow"):
            way()
    assert kept.tolist() == [1, 1]
    notices = reduced(Sum(), parts, into=kept)[1]
    assert [n for n in notices if "overflow" in n] == [
        f"'x': 1 finite values overflow {_name(dtype)}"
    ]
    endless = torch.tensor([float("inf"), 1], dtype=dtype)
    assert not reduced(Sum(), [endless, parts[1]], into=kept)[1]


def _name(dtype):
    return next(d.name for d in BY_NAME.values() if d.torch_name == str(dtype)[6:])


def test_replicas_that_are_equal_bit_by_bit_agree_whatever_they_are():
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e38])
    assert same_bits(value(Mean(), [odd, odd.clone()]), odd)
    for other in (1.0, float("inf")):
        with pytest.raises(CheckpointError, match="must agree"):
            value(Mean(), [odd, torch.tensor([other, float("inf"), 0.0, 1e38])])


def test_the_mean_of_many_pieces_counts_partitions_not_pieces():
    """A big one is written in blocks, whose copies are many."""
    parts = {"a": torch.arange(60.0).view(6, 10), "b": torch.arange(60.0).view(6, 10)}
    source = MemorySource(parts)
    plan = build_plan(
        source.catalog, NameMap((Rule(("a", "b"), ("x",), Mean()),)), None, Settings()
    )
    found = []
    for batch in batches(plan.tensors, 64):
        run = execute_chunks(plan, source, batch, CpuLane(chunk_bytes=64))
        found += [run.tensors[chunk.key] for chunk in batch]
    assert torch.equal(torch.cat(found), parts["a"].view(-1))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float8_e8m0fnu], ids=str)
def test_a_gap_is_nothing_only_between_equal_values(dtype):
    one = torch.tensor([1, 1]).to(dtype)
    two = one.clone()
    two.view(torch.uint8)[0] ^= 1  # the last bit of the first
    found = gaps(one, two)
    assert found[0] > 0
    assert found[1] == 0
    if dtype.is_complex:
        assert gaps(one, one + 1j).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_gaps_of_long_integers(dtype):
    info = torch.iinfo(dtype)
    one, two = whole(dtype, info.max, info.max), whole(dtype, info.max - 1, info.min)
    assert gaps(one, two).tolist() == [1.0, 2.0**64]
