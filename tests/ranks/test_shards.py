"""Parts of tensors: by torch's own rules of placing, and by whole loads that are sliced."""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from streamload.core.specs import contiguous_strides, numel
from streamload.mapping.layout import Layout, LayoutError, concat
from streamload.ranks.shards import Cut, is_ambiguous, part_of, shard_of
from tests.mapping.test_layout import carried_out, counted


def held(values: torch.Tensor, shard) -> torch.Tensor:
    """What the boxes say, slice by slice."""
    local = torch.full(shard.shape, -1.0)
    for box in shard.boxes:
        at, to = (
            tuple(slice(s, s + n) for s, n in zip(starts, box.shape, strict=True))
            for starts in (box.start, box.place)
        )
        local[to] = values[at]
    assert not (local == -1).any()
    return local


@st.composite
def cuts_of(draw, dims: int):
    """One to three dimensions of a mesh, plain or in groups."""
    meshes = draw(
        st.lists(
            st.tuples(st.integers(0, dims - 1), st.integers(1, 4), st.sampled_from([1, 1, 2, 3])),
            min_size=1,
            max_size=3,
        )
    )
    return [Cut(dim, parts, draw(st.integers(0, parts - 1)), g) for dim, parts, g in meshes]


@given(shape=st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple), data=st.data())
def test_places_are_those_of_torch(shape, data):
    cuts = data.draw(cuts_of(len(shape)))
    placements = [
        Shard(c.dim) if c.groups == 1 else _StridedShard(c.dim, split_factor=c.groups) for c in cuts
    ]
    mesh, at = [c.parts for c in cuts], [c.at for c in cuts]
    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, at, placements)
    shard = shard_of(shape, tuple(cuts))
    assert shard.shape == tuple(sizes)
    if numel(shard.shape):
        assert min(box.start for box in shard.boxes) == tuple(offsets)


@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), data=st.data())
def test_the_ranks_of_a_mesh_hold_everything_once(shape, data):
    cuts = data.draw(cuts_of(len(shape)))
    values, found = counted(shape), []
    for at in product(*(range(cut.parts) for cut in cuts)):
        one = [Cut(c.dim, c.parts, i, c.groups) for c, i in zip(cuts, at, strict=True)]
        found.append(held(values, shard_of(shape, tuple(one))).reshape(-1))
    assert torch.equal(torch.cat(found).sort().values, values.reshape(-1))


@given(rows=st.integers(1, 4), data=st.data())
def test_a_part_is_the_whole_sliced(rows, data):
    """Whatever re-lays a target, a rank's part of it is what a full load would be sliced to."""
    one, two = (2 * rows, 3, 4), (2 * rows, 5, 4)
    layout = concat([Layout.whole(0, one), Layout.whole(1, two)], 1)
    sources = [counted(one), counted(two) + 1000]
    whole = torch.cat(sources, 1)
    for _ in range(data.draw(st.integers(0, 3))):
        step = data.draw(st.sampled_from(["turn", "interleave", "flatten"]))
        size = layout.shape
        if step == "turn":
            dims = data.draw(st.permutations(range(len(size))))
            layout, whole = layout.permute(dims), whole.permute(dims)
        elif step == "interleave" and size[0] % 2 == 0 and len(size) == 3:
            dims, back = (1, 0, 2, 3), (2, size[0] // 2)
            with suppress(LayoutError):  # twice is too much for one layout
                layout = layout.unflatten(0, back).permute(dims).flatten(0, 1)
                whole = whole.unflatten(0, back).permute(dims).flatten(0, 1)
        elif step == "flatten" and len(size) > 1:
            layout, whole = layout.flatten(0, 1), whole.flatten(0, 1)
    cuts = data.draw(cuts_of(len(layout.shape)))
    shard = shard_of(layout.shape, tuple(cuts))
    part = part_of(layout, shard)
    expected = held(whole, shard)
    if numel(part.shape):
        assert torch.equal(carried_out(part, *sources), expected)
    else:
        assert not part.copies("01", contiguous_strides(part.shape))


@pytest.mark.parametrize(
    ("size", "cuts", "expected"),
    [
        (16, [Cut(0, 2, 0, 2), Cut(0, 2, 0)], False),
        (9, [Cut(0, 4, 0, 2), Cut(0, 2, 0)], True),  # the two readings differ
        (9, [Cut(0, 4, 0), Cut(0, 2, 0)], False),
        (9, [Cut(0, 2, 0, 3)], False),  # groups of its own, nothing said in advance
    ],
)
def test_uneven_parts_of_uneven_parts_may_be_ambiguous(size, cuts, expected):
    assert is_ambiguous((size,), cuts) is expected


def test_a_scalar_is_held_whole():
    (box,) = shard_of((), ()).boxes
    assert box.shape == shard_of((), ()).shape == ()
