"""Tensors in pieces: what a run of their elements takes of each, and which make no whole."""

from __future__ import annotations

import time
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.core.pieces import Box, Pieces, tiling_fault
from streamload.core.specs import TensorSpec


@st.composite
def tilings(draw):
    """A shape of up to four dimensions, and boxes that fill it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for offset, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += offset
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
        if all(0 in box.sizes for box in boxes):
            break
    return shape, draw(st.permutations(boxes))


@settings(deadline=None)
@given(tilings(), st.data())
def test_portions_put_together_are_the_whole(tiling, data):
    shape, boxes = tiling
    assert tiling_fault(shape, boxes) == ""
    boxes = [box for box in boxes if 0 not in box.sizes]
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    values = [
        whole[tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))]
        for box in boxes
    ]
    parts = tuple(TensorSpec(str(n), "I64", box.sizes, "f") for n, box in enumerate(boxes))
    pieces = Pieces(parts, "I64", "", shape, tuple(boxes))
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    run = torch.full((stop - start,), -1)
    reads = {piece: (first, last) for piece, first, last in pieces.reads(start, stop)}
    for portion in pieces.portions(start, stop):
        first, last = reads[portion.piece]
        assert first <= portion.start < portion.stop <= last
        taken = values[portion.piece].flatten()[portion.start : portion.stop].view(portion.shape)
        place = torch.as_strided(run, portion.shape, portion.strides, portion.offset)
        assert bool((place == -1).all())
        place.copy_(taken)
        if portion.is_run:
            end = portion.offset + taken.numel()
            assert torch.equal(run[portion.offset : end], taken.flatten())
    assert torch.equal(run, whole.flatten()[start:stop])


def grid(rows: int, columns: int) -> list[Box]:
    return [Box((3 * r, 2 * c), (3, 2)) for r, c in product(range(rows), range(columns))]


@pytest.mark.parametrize(
    ("shape", "boxes", "words"),
    [
        ((6, 4), grid(2, 2)[:3], "lack 6 of 24 elements"),
        ((6, 4), [*grid(2, 2), Box((0, 0), (3, 2))], "[0:3, 0:2] and [0:3, 0:2] overlap"),
        ((6, 4), [Box((0, 0), (4, 4)), Box((3, 0), (3, 4))], "[0:4, 0:4] and [3:6, 0:4] overlap"),
        ((6, 4), [Box((0, 0), (7, 4))], "reaches out of the shape [6, 4]"),
        ((6, 4), [Box((-1, 0), (7, 4))], "reaches out"),
        ((6, 4), [Box((0,), (6,))], "1 dimensions, the tensor 2"),
        ((6, 4), [Box((1, 0), (5, 4))], "lack 4 of 24"),
        ((6, 4), [], "lack 24 of 24"),
        ((), [], "lack 1 of 1"),
        ((), [Box((), ()), Box((), ())], "2 pieces hold its one element"),
        ((2, 2), [Box((0, 0), (1, 2)), Box((0, 0), (2, 1))], "overlap"),
        # As many elements as there should be, and yet one twice and one not at all.
        ((4,), [Box((0,), (2,)), Box((1,), (2,))], "overlap"),
    ],
)
def test_boxes_that_do_not_make_the_whole(shape, boxes, words):
    assert words in tiling_fault(shape, boxes)


def test_thousands_of_pieces_are_checked_in_no_time():
    start_s = time.process_time()
    boxes = grid(40, 100)
    assert tiling_fault((120, 200), boxes) == ""
    assert "lack 6 of" in tiling_fault((120, 200), boxes[:-1])
    rows = [Box((n, 0), (1, 2)) for n in range(60)]
    columns = [Box((0, 2 + n), (60, 1)) for n in range(3000)]
    assert tiling_fault((60, 3002), [*rows, *columns]) == ""
    # All of them across each other in one dimension: not compared one by one.
    crossing = [Box((0, n % 7), (60, 1)) for n in range(3000)]
    assert "overlap" in tiling_fault((60, 3000), crossing)
    apart = [Box((n, n), (1, 3000 - n)) for n in range(3000)]
    assert tiling_fault((3000, 1501), [box for box in apart if box.offsets[1] < 1501])
    assert time.process_time() - start_s < 5


def test_no_elements_need_no_pieces():
    assert tiling_fault((0, 4), []) == ""
    assert tiling_fault((4, 3), [Box((0, 0), (4, 3)), Box((4, 0), (0, 3))]) == ""
