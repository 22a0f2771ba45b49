"""Transforms against torch, by carrying out the moves they plan; and their way back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamload.mapping.layout import Layout, LayoutError
from streamload.mapping.transforms import (
    Chain,
    Concat,
    HeadSplit,
    Identity,
    Interleaved,
    Mean,
    Permute,
    Split,
    Sum,
    Transpose,
)

sizes = st.integers(1, 4)


def carried_out(transform, tensors, targets):
    """The targets, made by nothing but strided copies."""
    layouts = transform.forward(
        [Layout.whole(i, tuple(t.shape)) for i, t in enumerate(tensors)], targets
    )
    names = [str(i) for i in range(len(tensors))]
    made = []
    for layout in layouts:
        out = torch.full(layout.shape, torch.nan)
        for move in layout.moves(names):
            source = tensors[int(move.stored_name)].clone(memory_format=torch.contiguous_format)
            view = source.as_strided(move.shape, move.source_strides, move.source_offset)
            out.as_strided(move.shape, move.target_strides, move.target_offset).copy_(view)
        made.append(out)
    return made


def check(transform, tensors, expected):
    """Values are those of ``expected``; shapes lead back to those of ``tensors``."""
    found = carried_out(transform, tensors, [None] * len(expected))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    back = transform.source_shapes([tuple(one.shape) for one in expected])
    assert back == [tuple(t.shape) for t in tensors]


def counted(*shape, start=0):
    return torch.arange(torch.Size(shape).numel()).float().reshape(shape) + start


@given(sizes, sizes)
def test_transpose(rows, columns):
    tensor = counted(rows, columns)
    check(Transpose(), [tensor], [tensor.t()])


@given(st.permutations(range(3)), sizes, sizes)
def test_permute(dims, first, second):
    tensor = counted(first, second, 2)
    check(Permute(tuple(dims)), [tensor], [tensor.permute(dims)])


@given(st.lists(sizes, min_size=1, max_size=4), st.sampled_from([0, 1]), sizes)
def test_concat_and_split(parts, dim, other):
    whole = counted(sum(parts), other) if dim == 0 else counted(other, sum(parts))
    pieces = [piece.contiguous() for piece in whole.split(parts, dim)]
    check(Concat(dim, tuple(parts)), pieces, [whole])
    check(Split(dim, tuple(parts)), [whole], pieces)


@given(heads=sizes, half=sizes, width=sizes)
def test_interleaved_rows(heads, half, width):
    stored = counted(heads * half * 2, width)
    expected = stored.view(heads, half, 2, width).transpose(1, 2).reshape(stored.shape)
    check(Interleaved(heads), [stored], [expected])


@given(heads=sizes, groups=sizes, half=sizes)
def test_fused_projections_of_interleaved_files(heads, groups, half):
    q, k, v = (counted(n * half * 2, 3, start=100 * n) for n in (heads, groups, groups))
    rows = (len(q), len(k), len(v))
    turned = [
        w.view(n, half, 2, 3).transpose(1, 2).reshape(w.shape) for w, n in ((q, heads), (k, groups))
    ]
    fused = Concat(0, rows, (Interleaved(heads), Interleaved(groups), Identity()))
    check(fused, [q, k, v], [torch.cat((*turned, v))])


@given(heads=sizes, size=sizes, width=sizes)
def test_heads_of_fused_rows(heads, size, width):
    parts = [counted(heads, size, width, start=1000 * part) for part in range(3)]
    fused = torch.stack(parts, 1).reshape(heads * 3 * size, width)
    check(HeadSplit(heads), [fused], [part.reshape(-1, width) for part in parts])


@given(st.lists(sizes, min_size=2, max_size=3), sizes)
def test_a_chain_is_its_steps(parts, width):
    stored = counted(width, sum(parts))
    pieces = [piece.contiguous() for piece in stored.t().split(parts)]
    check(Chain(Transpose(), Split(0, tuple(parts))), [stored], pieces)
    turned = [piece.t().contiguous() for piece in pieces]
    joined = Chain(Transpose(), Concat(0, tuple(parts)))
    (found,) = carried_out(joined, turned, [None])
    assert torch.equal(found, stored.t())


@pytest.mark.parametrize(("transform", "way"), [(Sum(), "sum"), (Mean(), "mean")])
def test_arithmetic_covers_one_target_with_every_source(transform, way):
    assert transform.reduces == transform.label == way
    shape = (2, 3)
    (layout,) = transform.forward([Layout.whole(0, shape), Layout.whole(1, shape)], [None])
    assert layout.shape == shape
    assert [piece.source for piece in layout.pieces] == [0, 1]
    with pytest.raises(LayoutError, match="no way back"):
        transform.source_shapes([shape])


@pytest.mark.parametrize(
    ("transform", "shapes", "words"),
    [
        (Transpose(), [(3,)], "1 dimensions"),
        (Permute((0, 1)), [(2, 2, 2)], "permute"),
        (Identity(), [(2,), (2,)], "not 2"),
        (Concat(0), [(2, 3), (2, 4)], "concatenate"),
        (Concat(1), [(2,), (2,)], "dimension 1"),
        (Split(0, (1, 1)), [(3, 2)], r"3 rows into \[1, 1\]"),
        (HeadSplit(2), [(8, 2)], "2 heads of 3"),
        (Interleaved(2), [(6, 2)], "heads of pairs"),
        (Sum(), [(2,), (3,)], "sum"),
    ],
)
def test_shapes_that_do_not_fit_are_said(transform, shapes, words):
    layouts = [Layout.whole(i, shape) for i, shape in enumerate(shapes)]
    with pytest.raises(LayoutError, match=words):
        transform.forward(layouts, [None, None])


@pytest.mark.parametrize(
    ("transform", "shape"),
    [(Concat(0), (4, 2)), (Concat(0, (1, 2)), (4, 2)), (Concat(1, (1, 2)), (4,))],
)
def test_a_concat_goes_back_only_by_its_sizes(transform, shape):
    with pytest.raises(LayoutError):
        transform.source_shapes([shape])
