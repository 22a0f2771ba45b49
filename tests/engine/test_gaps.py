"""What a rank reads of stored tensors: its own elements, and short gaps between them."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from streamload.core.specs import numel
from streamload.engine import gaps
from streamload.engine.chunks import cut, runs_of, unwanted_in
from streamload.engine.gaps import RowReader, Rows
from streamload.mapping.layout import Layout
from streamload.ranks.shards import Cut, part_of, shard_of
from streamload.sources.detect import open_checkpoint
from streamload.sources.in_memory import MemorySource
from streamload.sources.wrapping.reader import Reader

GAP = 3  # elements


@pytest.fixture(autouse=True, scope="module")
def short_gaps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaps, "_LONG_BYTES", 4 * 6)
        yield


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 8), min_size=1, max_size=4).map(tuple),
    chunk=st.integers(1, 300),
    data=st.data(),
)
def test_a_rank_reads_its_own_and_short_gaps(shape, chunk, data):
    layouts = [Layout.whole(0, shape)]
    if data.draw(st.booleans()):
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, shape[dim]))
        layouts = [layouts[0].narrow(dim, 0, at), layouts[0].narrow(dim, at, shape[dim] - at)]
    dims = data.draw(st.permutations(range(len(shape))))
    cuts = tuple(
        Cut(data.draw(st.integers(0, len(shape) - 1)), parts, data.draw(st.integers(0, parts - 1)))
        for parts in data.draw(st.lists(st.integers(1, 3), max_size=2))
    )
    layouts = [layout.permute(dims) for layout in layouts]
    layouts = [part_of(layout, shard_of(layout.shape, cuts)) for layout in layouts]
    copies = [(i, m) for i, layout in enumerate(layouts) for m in layout.copies(["s"])]
    if not copies:
        return
    stored = torch.arange(numel(shape)).float()
    wanted = torch.zeros(numel(shape), dtype=torch.bool)
    for _, copy in copies:
        torch.as_strided(wanted, copy.shape, copy.source_strides, copy.source_offset).fill_(True)
    reads = torch.zeros(numel(shape), dtype=torch.int64)
    targets = [torch.full((numel(layout.shape),), -1.0) for layout in layouts]
    sizes = {"itemsize": 4, "chunk_bytes": chunk, "staging_bytes": chunk, "staged_itemsize": 4}
    unwanted = 0
    for block in cut(copies, **sizes, gap_bytes=4 * GAP):
        read = torch.cat([stored[start:stop] for start, stop in runs_of([block])])
        assert read.numel() == block.stop - block.start
        for start, stop in runs_of([block]):
            reads[start:stop] += 1
            gap = 0
            for is_wanted in wanted[start:stop].tolist():
                gap = 0 if is_wanted else gap + 1
                assert gap < GAP
        unwanted += unwanted_in([block])
        for part in block.parts:
            source = torch.as_strided(read, part.shape, part.source_strides, part.source_offset)
            place = (part.shape, part.target_strides, part.target_offset)
            torch.as_strided(targets[part.target], *place).copy_(source)
    # Parts of several targets that lie across each other unevenly may be read for each of them.
    assert (reads[wanted] >= 1).all()
    assert int(reads.max()) <= len(layouts)
    if len(layouts) == 1:
        assert unwanted == int(reads.sum()) - int(wanted.sum())
    for layout, target in zip(layouts, targets, strict=True):
        assert (target >= 0).all()
        for copy in layout.copies(["s"]):
            there = (copy.shape, copy.target_strides, copy.target_offset)
            here = (copy.shape, copy.source_strides, copy.source_offset)
            assert torch.equal(torch.as_strided(target, *there), torch.as_strided(stored, *here))


@pytest.mark.parametrize("is_held", [False, True])
def test_rows_are_read_end_to_end(tmp_path, is_held):
    stored = bytes(range(40))
    values = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
    save_file({"x": values}, tmp_path / "x.safetensors")
    source = MemorySource({"x": values}) if is_held else open_checkpoint(tmp_path / "x.safetensors")
    reader = Reader(source, source.catalog["x"])

    for start, stop in combinations(range(13), 2):
        buffer = bytearray(stop - start)
        rows = RowReader(reader, Rows(start=3, stride=10, width=4), 1)
        rows(start, stop, memoryview(buffer))
        ends = [3 + 10 * (at // 4) + at % 4 for at in range(start, stop)]
        assert list(buffer) == [stored[at] for at in ends]


def test_parts_that_lie_across_each_other_are_read_once():
    """Half of the columns of fused queries, keys and values that lie row by row in turn."""
    layout = Layout.whole(0, (4, 3, 16)).narrow(2, 0, 8)
    parts = [layout.narrow(1, at, 1) for at in range(3)]
    copies = [(i, m) for i, part in enumerate(parts) for m in part.copies(["s"])]
    sizes = {"itemsize": 4, "chunk_bytes": 4096, "staging_bytes": 4096, "staged_itemsize": 4}
    runs = [run for block in cut(copies, **sizes, gap_bytes=4 * GAP) for run in runs_of([block])]
    assert sorted(runs) == [(row * 16, row * 16 + 8) for row in range(12)]
