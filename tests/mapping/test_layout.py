"""Layouts against torch's own operations: views of random shapes, cut and put together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamload.core.specs import contiguous_strides, numel
from streamload.mapping.layout import (
    Layout,
    LayoutError,
    coalesced,
    concat,
    inverse,
    stored_order_strides,
)

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def carried_out(layout: Layout, *sources: torch.Tensor, strides=None) -> torch.Tensor:
    """What the engine does with a layout, every element of the target once."""
    target = torch.full((numel(layout.shape),), -1.0)
    writes = torch.zeros(numel(layout.shape), dtype=torch.int64)
    names = [str(i) for i in range(len(sources))]
    for copy in layout.copies(names, strides):
        flat = sources[int(copy.stored_name)].reshape(-1)
        source = torch.as_strided(flat, copy.shape, copy.source_strides, copy.source_offset)
        view = (copy.shape, copy.target_strides, copy.target_offset)
        torch.as_strided(target, *view).copy_(source)
        torch.as_strided(writes, *view).add_(1)
    assert (writes == 1).all()
    return torch.as_strided(target, layout.shape, strides or contiguous_strides(layout.shape))


def counted(shape) -> torch.Tensor:
    return torch.arange(float(numel(shape))).reshape(shape)


@given(shape=SHAPES, data=st.data())
def test_chains_of_views_are_torchs(shape, data):
    """permute, narrow, unflatten and flatten in any order; what cannot be said is an error."""
    tensor, layout = counted(shape), Layout.whole(0, shape)
    for _ in range(data.draw(st.integers(1, 5))):
        size = layout.shape
        step = data.draw(st.sampled_from(["permute", "narrow", "unflatten", "flatten"]))
        dim = data.draw(st.integers(0, len(size) - 1))
        try:
            if step == "permute":
                dims = data.draw(st.permutations(range(len(size))))
                layout, tensor = layout.permute(dims), tensor.permute(dims)
            elif step == "narrow":
                start = data.draw(st.integers(0, size[dim] - 1))
                length = data.draw(st.integers(1, size[dim] - start))
                layout, tensor = (
                    layout.narrow(dim, start, length),
                    tensor.narrow(dim, start, length),
                )
            elif step == "unflatten":
                inner = data.draw(st.sampled_from([n for n in range(1, 5) if size[dim] % n == 0]))
                sizes = (size[dim] // inner, inner)
                layout, tensor = layout.unflatten(dim, sizes), tensor.unflatten(dim, sizes)
            else:
                last = data.draw(st.integers(dim, len(size) - 1))
                layout, tensor = layout.flatten(dim, last), tensor.flatten(dim, last)
        except LayoutError:
            continue  # refused: nothing changed
        assert layout.shape == tuple(tensor.shape)
    assert torch.equal(carried_out(layout, counted(shape)), tensor)


@given(shape=SHAPES, data=st.data())
def test_concat_is_torchs(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    parts = [
        counted((*shape[:dim], size, *shape[dim + 1 :])) + 100 * i for i, size in enumerate(sizes)
    ]
    layout = concat([Layout.whole(i, tuple(p.shape)) for i, p in enumerate(parts)], dim)
    assert torch.equal(carried_out(layout, *parts), torch.cat(parts, dim))


@given(shape=SHAPES, data=st.data())
def test_targets_and_sources_of_any_dense_strides(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    stored = counted(shape).permute(order)  # the file's bytes are in another order of dimensions
    target = data.draw(st.permutations(range(len(shape))))
    strides = counted(tuple(stored.shape)).permute(target).contiguous()
    strides = strides.permute([target.index(d) for d in range(len(shape))]).stride()
    layout = Layout.whole(0, tuple(stored.shape), stored.stride())
    assert torch.equal(carried_out(layout, counted(shape), strides=strides), stored)


@given(shape=SHAPES, data=st.data())
def test_the_view_of_one_stored_tensor_is_told(shape, data):
    dims = data.draw(st.permutations(range(len(shape))))
    size = tuple(shape[d] for d in dims)
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, size[dim] - 1))
    layout = Layout.whole(0, shape).permute(dims).narrow(dim, start, size[dim] - start)
    offset, strides = layout.source_strides()
    found = torch.as_strided(counted(shape), layout.shape, strides, offset)
    assert torch.equal(found, counted(shape).permute(dims).narrow(dim, start, size[dim] - start))


@given(shape=SHAPES, data=st.data())
def test_stored_order_is_dense_and_keeps_the_files_order(shape, data):
    dims = data.draw(st.permutations(range(len(shape))))
    layout = Layout.whole(0, shape).permute(dims)
    strides = stored_order_strides(layout)
    made = torch.empty_strided(layout.shape, strides)
    assert made.untyped_storage().nbytes() == 4 * numel(shape)  # dense
    assert torch.equal(
        carried_out(layout, counted(shape), strides=strides), counted(shape).permute(dims)
    )
    (copy,) = layout.copies(["0"], strides)
    assert copy.source_strides == copy.target_strides == (1,) or numel(shape) == 1


def test_a_target_of_several_pieces_is_no_view():
    layout = concat([Layout.whole(0, (2,)), Layout.whole(1, (2,))], 0)
    assert layout.source_strides() is None
    assert stored_order_strides(layout) is None


@given(shape=SHAPES, data=st.data())
def test_inverse_moves_go_back(shape, data):
    dims = data.draw(st.permutations(range(len(shape))))
    (copy,) = Layout.whole(0, shape).permute(dims).copies(["0"])
    back = inverse(copy, "t")
    moved = counted(shape).permute(dims).reshape(-1)
    restored = torch.empty(numel(shape))
    torch.as_strided(restored, back.shape, back.target_strides, back.target_offset).copy_(
        torch.as_strided(moved, back.shape, back.source_strides, back.source_offset)
    )
    assert torch.equal(restored, counted(shape).reshape(-1))
    again = inverse(back, "0")
    assert (again.shape, again.source_strides) == (copy.shape, copy.source_strides)


def test_moves_have_as_few_axes_as_can_be():
    assert Layout.whole(0, (2, 3, 4)).copies(["a"])[0].shape == (24,)
    assert Layout.whole(0, (2, 3, 4)).permute((1, 2, 0)).copies(["a"])[0].shape == (2, 12)
    assert Layout.whole(0, ()).copies(["a"])[0].shape == (1,)
    assert coalesced("a", [(1, 7, 9), (3, 1, 1)], 0, 0).shape == (3,)


def test_nothing_is_moved_for_targets_without_elements():
    assert Layout.whole(0, (0, 2**62)).copies(["a"]) == ()
    assert concat([Layout.whole(0, (0, 2)), Layout.whole(1, (3, 2))], 0).copies(["a", "b"])[
        0
    ].shape == (6,)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.permute((0,)),
        lambda x: x.permute((0, 0)),
        lambda x: x.narrow(0, 1, 2),
        lambda x: x.narrow(0, -1, 1),
        lambda x: x.unflatten(1, (2, 2)),
        lambda x: concat([x, Layout.whole(1, (2, 4))], 0),
        lambda x: concat([x, Layout.whole(1, (3,))], 0),
        lambda x: concat([x, x], 2),
    ],
)
def test_shapes_that_do_not_fit_are_layout_errors(make):
    with pytest.raises(LayoutError):
        make(Layout.whole(0, (2, 3)))
