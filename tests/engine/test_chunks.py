"""Blocks and slabs of any moves and budgets: every element is moved, exactly once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.core.specs import contiguous_strides, numel
from streamload.engine.chunks import cut
from streamload.engine.output_chunks import batches
from streamload.mapping.layout import Layout, concat
from streamload.planning.records import PlannedTensor

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def view(flat, shape, strides, offset):
    return torch.as_strided(flat, shape, strides, offset)


@st.composite
def moves_of_one_tensor(draw):
    """A stored tensor, whole or cut in two along any dimension, permuted in any way."""
    shape = draw(SHAPES)
    layouts = [Layout.whole(0, shape)]
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, shape[dim]))
        pieces = ((0, at), (at, shape[dim] - at))
        layouts = [layouts[0].narrow(dim, start, n) for start, n in pieces if n]
    dims = draw(st.permutations(range(len(shape))))
    layouts = [layout.permute(dims) for layout in layouts]
    copies = [(i, m) for i, layout in enumerate(layouts) for m in layout.copies(["s"])]
    return shape, layouts, copies


@settings(deadline=None)
@given(
    made=moves_of_one_tensor(),
    chunk=st.integers(1, 300),
    staging=st.integers(1, 300),
    quantum=st.integers(1, 7),
)
def test_every_element_is_moved_once_and_blocks_keep_to_their_size(made, chunk, staging, quantum):
    shape, layouts, copies = made
    stored = torch.arange(numel(shape)).float()
    targets = [torch.full((numel(layout.shape),), -1.0) for layout in layouts]
    writes = [torch.zeros(numel(layout.shape)) for layout in layouts]
    position = 0
    for block in cut(
        copies,
        itemsize=4,
        chunk_bytes=chunk,
        staging_bytes=staging,
        staged_itemsize=4,
        quantum=quantum,
    ):
        assert block.start >= position, "blocks are in the file's order and do not overlap"
        position = block.stop
        assert block.parts
        if block.direct:
            assert (block.stop - block.start) * 4 <= max(chunk, 4 * quantum)
        bounds = {copies[0][1].source_offset, copies[0][1].source_end, numel(shape)}
        for bound in (block.start, block.stop):
            assert bound % quantum == 0 or bound in bounds or not block.direct
        read = stored[block.start : block.stop].clone()
        for part in block.parts:
            place = (part.shape, part.target_strides, part.target_offset)
            source = view(read, part.shape, part.source_strides, part.source_offset)
            view(targets[part.target], *place).copy_(source)
            view(writes[part.target], *place).add_(1)
    assert all((w == 1).all() for w in writes)
    for layout, target in zip(layouts, targets, strict=True):
        (copy,) = layout.copies(["s"])
        wanted = view(stored, copy.shape, copy.source_strides, copy.source_offset)
        got = view(target, copy.shape, copy.target_strides, copy.target_offset)
        assert torch.equal(got, wanted)


def test_a_large_matrix_that_is_turned_goes_in_panels_of_whole_rows():
    layout = Layout.whole(0, (100, 8)).permute((1, 0))
    copies = [(0, m) for m in layout.copies(["s"])]
    blocks = list(cut(copies, itemsize=4, chunk_bytes=64, staging_bytes=320, staged_itemsize=4))
    assert all(block.staged for block in blocks)
    assert {(b.stop - b.start) * 4 for b in blocks} == {320}
    assert all(b.start % 8 == 0 for b in blocks)


def test_what_is_left_out_at_the_ends_is_not_read():
    layout = Layout.whole(0, (10, 4)).narrow(0, 3, 2)
    blocks = list(
        cut(
            [(0, m) for m in layout.copies(["s"])],
            itemsize=4,
            chunk_bytes=1 << 20,
            staging_bytes=1,
            staged_itemsize=4,
        )
    )
    assert [(b.start, b.stop) for b in blocks] == [(12, 20)]


@settings(deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=3),
    budget=st.integers(1, 400),
    data=st.data(),
)
def test_slabs_make_every_element_of_every_target_once(shapes, budget, data):
    planned, expected = [], {}
    for at, shape in enumerate(shapes):
        dims = data.draw(st.permutations(range(len(shape))))
        layout = Layout.whole(0, shape).permute(dims)
        if data.draw(st.booleans()):
            layout = concat([layout, layout], data.draw(st.integers(0, len(shape) - 1)))
        name = f"t{at}"
        planned.append(
            PlannedTensor(
                name,
                (),
                (f"s{at}",),
                layout.shape,
                contiguous_strides(layout.shape),
                "F32",
                "F32",
                layout.copies([f"s{at}"]),
            )
        )
        expected[name] = numel(layout.shape)
    covered = {name: torch.zeros(count) for name, count in expected.items()}
    for batch in batches(planned, budget):
        for slab in batch:
            made = torch.full((numel(slab.planned.shape),), -1.0)
            for copy in slab.planned.copies:
                stored = torch.arange(float(numel(shapes[int(copy.stored_name[1:])])))
                source = view(stored, copy.shape, copy.source_strides, copy.source_offset)
                view(made, copy.shape, copy.target_strides, copy.target_offset).copy_(source)
            assert (made >= 0).all()
            covered[slab.name][slab.start : slab.start + made.numel()] += 1
            whole = next(p for p in planned if p.name == slab.name)
            assert torch.equal(made, assembled(whole, shapes)[slab.start :][: made.numel()])
    assert all((count == 1).all() for count in covered.values())


def assembled(planned, shapes):
    target = torch.full((numel(planned.shape),), -1.0)
    for copy in planned.copies:
        stored = torch.arange(float(numel(shapes[int(copy.stored_name[1:])])))
        source = view(stored, copy.shape, copy.source_strides, copy.source_offset)
        view(target, copy.shape, copy.target_strides, copy.target_offset).copy_(source)
    return target
