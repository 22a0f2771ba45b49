"""Tiles of float32 rows that are turned: torch's own transposition is the judge, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamload
from streamload import Chain, Concat, NameMap, Rule, Split, StreamloadError, Transpose
from streamload.engine.casts import may_overflow
from streamload.engine.chunks import cut
from streamload.engine.lanes import turning
from streamload.engine.lanes.turning import columns_to_turn, parts_of, tiles
from tests.engine.test_chunks import moves_of_one_tensor, view
from tests.support.tiny import same_bits, write

needs_kernel = pytest.mark.skipif(
    not turning.turns_fast(), reason="torch's channel shuffle is vectorised for AVX2 and AVX-512"
)
ODD = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 3.3e38, -3.4e38, 65519.0, 65520.0]


def matrix(rows, columns):
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    odd = torch.tensor(ODD)
    made.view(-1)[: len(odd)] = odd[: made.numel()]
    made.view(torch.int32).view(-1)[-1] = 0x7FA00001  # a signalling NaN with a payload
    return made


@pytest.fixture
def count(monkeypatch):
    """How many tiles were turned."""
    seen = []
    shuffle = torch.channel_shuffle
    monkeypatch.setattr(
        torch, "channel_shuffle", lambda x, rows: seen.append((rows, x.numel())) or shuffle(x, rows)
    )
    return seen


def both_ways(path, table, monkeypatch, **options):
    """What tiles make, and what panels make."""
    yield streamload.load_state_dict(path, mapping=table, layout="contiguous", **options)
    with monkeypatch.context() as patch:
        patch.setattr(turning, "turns_fast", lambda: False)
        yield streamload.load_state_dict(path, mapping=table, layout="contiguous", **options)


@needs_kernel
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float64", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(1, 40), (40, 2), (33, 31), (64, 48), (500, 37), (37, 500)])
@pytest.mark.parametrize("chunk_bytes", [32 << 10, None])
def test_bits_are_those_of_a_transposed_copy(
    tmp_path, monkeypatch, count, shape, dtype, chunk_bytes
):
    monkeypatch.setattr(turning, "_TILE_BYTES", 8 << 10)
    w = matrix(*shape)
    path = write(tmp_path / "x.safetensors", {"w": w})
    table = NameMap((Rule("w", "w", Transpose()),))
    for found in both_ways(path, table, monkeypatch, dtype=dtype, chunk_bytes=chunk_bytes):
        cast = w if dtype is None else w.to(getattr(torch, dtype))
        assert same_bits(found["w"], cast.t().contiguous())
    # A matrix of one row is the same either way round.
    assert sum(rows for rows, _ in count) == (shape[0] if min(shape) > 1 else 0)
    assert not (shape[0] > 64 and chunk_bytes) or len(count) > 1


@needs_kernel
def test_one_tensor_for_several_and_several_for_one(tmp_path, monkeypatch, count):
    tensors = {"fused": matrix(64, 96), "one": matrix(64, 20), "two": matrix(64, 30)}
    path = write(tmp_path / "x.safetensors", tensors)
    rules = (
        Rule("fused", ("q", "k", "v"), Chain(Transpose(), Split(0))),
        Rule(("one", "two"), "both", Chain(Concat(1), Transpose())),
    )
    from torch import nn

    module = nn.Module()
    shapes = {"q": (32, 64), "k": (20, 64), "v": (44, 64), "both": (50, 64)}
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
    streamload.load_into(module, path, mapping=NameMap(rules), dtype="bfloat16")
    q, k, v = tensors["fused"].t().bfloat16().split([32, 20, 44])
    both = torch.cat([tensors["one"], tensors["two"]], 1).t().bfloat16()
    for name, expected in {"q": q, "k": k, "v": v, "both": both}.items():
        assert same_bits(getattr(module, name).detach(), expected.contiguous()), name
    assert sum(rows for rows, _ in count) == 3 * 64


@needs_kernel
@pytest.mark.parametrize(
    ("dtype", "name"), [("float16", "F16"), ("bfloat16", "BF16"), ("float8_e4m3fn", "F8_E4M3")]
)
def test_overflows_are_counted_as_ever(tmp_path, monkeypatch, count, dtype, name):
    w = torch.ones(200, 40)
    w[3, 5] = w[150, 39] = 3.4e38
    w[7, 7] = float("inf")  # is no overflow
    w[8, 8] = float("nan")
    path = write(tmp_path / "x.safetensors", {"w": w})
    table = NameMap((Rule("w", "w", Transpose()),))
    said = []
    for refused in both_ways_refused(path, table, monkeypatch, dtype):
        said.append(str(refused.value))
        assert f"'w': 2 finite values overflow {name};" in said[-1]
    assert said[0] == said[1]
    assert count


def both_ways_refused(path, table, monkeypatch, dtype):
    for fast in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(turning, "turns_fast", lambda fast=fast: fast)
            with pytest.raises(StreamloadError) as refused:
                streamload.load_state_dict(path, mapping=table, dtype=dtype, overflow="refuse")
        yield refused


@pytest.mark.parametrize(
    ("values", "dtype", "may"),
    [
        ([1.0, -2.0], torch.float16, False),
        ([65520.0], torch.float16, True),
        ([-65520.0] + 99 * [0.0], torch.float16, True),
        ([3.4e38], torch.bfloat16, True),
        ([float("nan")], torch.bfloat16, True),
        ([float("inf")], torch.bfloat16, True),
        ([3.4e38], torch.float32, False),
        ([449.0], torch.float8_e4m3fn, True),
        ([], torch.float16, False),
    ],
)
def test_a_glance_never_overlooks_an_overflow(values, dtype, may):
    assert may_overflow(torch.tensor(values), dtype) is may


def test_other_dtypes_and_processors_take_panels(monkeypatch):
    (chunk,) = cut(
        list(enumerate(transposition(64, 32))),
        itemsize=4,
        chunk_bytes=1 << 20,
        staging_bytes=1 << 20,
        staged_itemsize=4,
    )
    assert columns_to_turn(chunk, torch.float16, 1 << 20) == 0
    assert columns_to_turn(chunk, torch.float32, 100) == 0  # not even a few rows
    monkeypatch.setattr(turning, "turns_fast", lambda: False)
    assert columns_to_turn(chunk, torch.float32, 1 << 20) == 0
    monkeypatch.setattr(turning, "turns_fast", lambda: True)
    assert columns_to_turn(chunk, torch.float32, 1 << 20) == 32


def transposition(rows, columns):
    from streamload.mapping.layout import Layout

    return Layout.whole(0, (rows, columns)).permute((1, 0)).copies(["s"])


@settings(deadline=None)
@given(made=moves_of_one_tensor(), staging=st.integers(1, 300), tile=st.integers(4, 200))
def test_parts_of_tiles_take_each_element_to_its_place(made, staging, tile):
    shape, layouts, copies = made
    source = torch.arange(float(torch.Size(shape).numel()))
    expected = [layout_values(layout, copies, i, source) for i, layout in enumerate(layouts)]
    found = [torch.full_like(values, -1) for values in expected]
    for chunk in cut(copies, itemsize=4, chunk_bytes=64, staging_bytes=staging, staged_itemsize=4):
        columns = columns_to_turn(chunk, torch.float32, 1 << 20) if chunk.staged else 0
        flat = source[chunk.start : chunk.stop].clone()
        if not columns:
            for part in chunk.parts:
                move(flat, part, found)
            continue
        rows = flat.view(-1, columns)
        for start, stop in tiles(len(rows), columns, tile):
            for part in parts_of(chunk.parts, columns, start, stop):
                move(rows[start:stop].t().flatten().clone(), part, found)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def move(flat, part, found):
    target = view(found[part.target], part.shape, part.target_strides, part.target_offset)
    target.copy_(view(flat, part.shape, part.source_strides, part.source_offset))


def layout_values(layout, copies, number, source):
    """A flat target by its moves alone."""
    made = torch.full((torch.Size(layout.shape).numel(),), -1.0)
    for target, copy in copies:
        if target == number:
            to = view(made, copy.shape, copy.target_strides, copy.target_offset)
            to.copy_(view(source, copy.shape, copy.source_strides, copy.source_offset))
    return made
