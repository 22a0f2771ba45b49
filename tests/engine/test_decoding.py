"""Encoded tensors in the engine: what is read, in which runs, by whom, and with what memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload import MemorySource
from streamload.core.encoding import Encoding, staging_bytes, values_at_once
from streamload.core.options import Settings
from streamload.core.specs import TensorSpec, stored_bytes
from streamload.decoding import registry
from streamload.decoding.scaled import Scaled
from streamload.engine.execute import execute
from streamload.engine.jobs import jobs_of
from streamload.engine.lanes.cpu import CpuLane
from streamload.engine.lanes.device import DeviceLane
from streamload.planning.build import build_plan
from streamload.sources.blocks import bytes_of
from streamload.sources.wrapping.reader import Reader, values_of
from streamload.sources.wrapping.wrapping_source import WrappingSource
from tests.engine.devices.fake_device import FakeOps
from tests.support.tiny import values

ROWS, COLUMNS, BLOCK = 50, 21, (8, 5)
Q = torch.randint(-128, 128, (2, ROWS, COLUMNS), generator=torch.Generator().manual_seed(1))
GRID = values(1, 2, 7, 5)
DECODED = Q * GRID.repeat_interleave(8, 1)[:, :ROWS].repeat_interleave(5, 2)[:, :, :COLUMNS]


def scaled(source: MemorySource, name: str = "w") -> TensorSpec:
    parts = source.catalog["w"], source.catalog["s"]
    encoding = Scaled(parts, "I8", code="I8", rows=ROWS, columns=COLUMNS, block=BLOCK)
    return TensorSpec(name, "F32", (2, ROWS, COLUMNS), source.path, encoding=encoding)


class Slow(MemorySource):
    """Reads from files, as it were: nothing is held in memory, and reads are noted."""

    def __init__(self, tensors) -> None:
        super().__init__(tensors)
        self.noted: list[tuple[str, int, int]] = []
        self.hinted: list[tuple[str, int, int]] = []

    def held(self, name):
        return None

    def read_into(self, extent, buffer, *, tensor=None):
        self.noted.append((extent.file, extent.offset, extent.offset + extent.nbytes))
        super().read_into(extent, buffer, tensor=tensor)

    def prefetch(self, extent):
        self.hinted.append((extent.file, extent.offset, extent.offset + extent.nbytes))


@pytest.fixture
def inner() -> Slow:
    return Slow({"w": Q.to(torch.int8), "s": GRID, "plain": values(3, 9)})


@pytest.fixture
def source(inner: Slow) -> WrappingSource:
    return WrappingSource(inner, [scaled(inner)], {"s"})


@settings(deadline=None, max_examples=60)
@given(bounds=st.tuples(st.integers(0, DECODED.numel()), st.integers(0, DECODED.numel())))
def test_any_run_of_elements_can_be_read(bounds):
    start, stop = sorted(bounds)
    inner = MemorySource({"w": Q.to(torch.int8), "s": GRID})
    source = WrappingSource(inner, [scaled(inner)], {"s"})
    found = torch.empty(stop - start)
    Reader(source, source.catalog["w"])(start, stop, bytes_of(found))
    assert torch.equal(found, DECODED.reshape(-1)[start:stop])


def test_long_runs_are_decoded_in_steps(monkeypatch):
    monkeypatch.setattr("streamload.core.encoding._AT_ONCE", 100)
    inner = Slow({"w": Q.to(torch.int8), "s": GRID})
    source = WrappingSource(inner, [scaled(inner)], {"s"})
    assert torch.equal(source.tensor("w"), DECODED)
    reads = [stop - start for name, start, stop in inner.noted if name == "w"]
    assert len(reads) == 25
    assert max(reads) <= 100 // COLUMNS * COLUMNS


def test_a_wrapping_source_shows_its_own_tensor_and_reads_the_inner_one(source, inner):
    assert list(source.catalog) == ["w", "plain"]
    assert source.below("w") is inner
    assert source.held("w") is None
    assert source.mapped("w") is None
    assert torch.equal(source.tensor("w"), DECODED)
    assert torch.equal(source.tensor("plain"), values(3, 9))
    spec = source.catalog["w"]
    assert spec.nbytes == DECODED.numel() * 4
    assert stored_bytes([spec]) == Q.numel() + GRID.numel() * 4
    assert source.catalog.nbytes == stored_bytes([spec]) + 36


@pytest.mark.parametrize("chunk_bytes", [1, 100, 999, 1 << 20])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32", "float64"])
def test_streaming_decodes_and_casts(source, chunk_bytes, workers, dtype):
    from streamload.core.dtypes import parse_dtype

    done: list[tuple[int, int]] = []
    options = Settings(chunk_bytes=chunk_bytes, workers=workers, dtype=parse_dtype(dtype))
    plan = build_plan(source.catalog, None, None, options)
    lane = CpuLane(chunk_bytes=chunk_bytes)
    run = execute(plan, source, lane, progress=lambda now, total, _: done.append((now, total)))
    found = run.tensors["w"]
    assert found.dtype == getattr(torch, dtype or "bfloat16")
    assert torch.equal(found, DECODED.to(found.dtype))
    assert run.bytes_read == source.catalog.nbytes, "each part's bytes are counted once"
    assert done[-1] == (source.catalog.nbytes,) * 2


def test_chunks_keep_to_the_quantum_and_are_split_between_workers(source):
    options = Settings(chunk_bytes=1000)
    plan = build_plan(source.catalog, None, None, options)
    order = {name: at for at, name in enumerate(plan.stored)}
    jobs = list(jobs_of(plan.tensors[:1], plan.stored, order, {"w": 0}, options))
    assert len(jobs) > 5
    chunks = [chunk for job in jobs for chunk in job.chunks]
    assert all(chunk.start % COLUMNS == 0 and chunk.stop % COLUMNS == 0 for chunk in chunks)
    assert sum(job.nbytes for job in jobs) == stored_bytes([source.catalog["w"]])
    read = {e.file for job in jobs for e in job.extents}
    assert read == {"w", "s"}
    at = 0
    for job in jobs:
        (extent,) = [e for e in job.extents if e.file == "w"]
        assert extent.offset == at
        at += extent.nbytes
    assert at == Q.numel()


def test_only_what_is_hinted_is_read(source, inner):
    plan = build_plan(source.catalog, None, None, Settings(chunk_bytes=500, workers=1))
    execute(plan, source, CpuLane(chunk_bytes=500))
    hinted = {(name, at) for name, start, stop in inner.hinted for at in range(start, stop)}
    read = {(name, at) for name, start, stop in inner.noted for at in range(start, stop)}
    assert read == hinted


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("chunk_bytes", [64, 5000])
def test_stored_orders_are_turned_as_plain_ones(inner, order, chunk_bytes):
    """As gpt-oss's experts: decoded in the stored order, wanted in another."""
    spec = scaled(inner)
    strides = (ROWS * COLUMNS, COLUMNS, 1)
    turned = TensorSpec(
        "w",
        "F32",
        tuple(spec.shape[d] for d in order),
        spec.file,
        strides=tuple(strides[d] for d in order),
        encoding=spec.encoding,
    )
    source = WrappingSource(inner, [turned], {"s"})
    options = Settings(chunk_bytes=chunk_bytes, staging_bytes=3000)
    plan = build_plan(source.catalog, None, None, options)
    found = execute(plan, source, CpuLane(chunk_bytes=chunk_bytes)).tensors["w"]
    expected = DECODED.permute(order)
    assert found.is_contiguous()
    assert torch.equal(found, expected.bfloat16())
    assert torch.equal(source.tensor("w"), expected)


@pytest.mark.parametrize("slot_bytes", [64, 1000, 1 << 16])
def test_a_device_lane_gets_decoded_values(source, slot_bytes):
    plan = build_plan(source.catalog, None, None, Settings(chunk_bytes=2000))
    lane = DeviceLane(FakeOps(3), slots=2, slot_bytes=slot_bytes)
    found = execute(plan, source, lane).tensors["w"]
    assert torch.equal(found, DECODED.bfloat16())


@dataclass(frozen=True)
class Halved(Encoding):
    """Half of another tensor, which may be encoded itself."""

    kind: ClassVar[str] = "halved"

    @property
    def words(self) -> str:
        return "halved"

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        yield 0, start, stop


def test_encodings_lie_over_each_other(source, monkeypatch):
    """As an adapter over a quantised weight; all are called alike."""

    def halve(encoding, parts, start, stop, out):
        torch.mul(parts.read(0, start, stop), 0.5, out=out)

    known = registry.decoder_of
    monkeypatch.setattr(
        "streamload.sources.wrapping.reader.decoder_of",
        lambda kind: halve if kind == "halved" else known(kind),
    )
    below = source.catalog["w"]
    spec = TensorSpec("w", "F32", below.shape, "", encoding=Halved((below,), "I8", "F32"))
    outer = WrappingSource(source, [spec])
    assert torch.equal(outer.tensor("w"), DECODED / 2)
    plain = WrappingSource(source, [])
    assert torch.equal(values_of(plain, plain.catalog["w"]), DECODED)
    plan = build_plan(outer.catalog, None, None, Settings(chunk_bytes=333, workers=2))
    found = execute(plan, outer, CpuLane(chunk_bytes=333))
    assert found.tensors["w"].dtype == torch.float32, "what the outer encoding says"
    assert torch.equal(found.tensors["w"], DECODED / 2)
    assert found.bytes_read == outer.catalog.nbytes


def test_parts_that_can_but_be_read_whole(inner):
    """As those of a pickle without places: read once for all chunks, and counted as memory."""
    wide = Slow({"w": Q.to(torch.int8).repeat(1, 1, 2)[..., :COLUMNS], "s": GRID})
    assert wide.catalog["w"].extent is None
    calls = []
    known = wide.tensor
    wide.tensor = lambda name: calls.append(name) or known(name)
    source = WrappingSource(wide, [scaled(wide)], {"s"})
    assert source.catalog["w"].is_whole
    plan = build_plan(source.catalog, None, None, Settings(chunk_bytes=400, workers=2))
    found = execute(plan, source, CpuLane(chunk_bytes=400)).tensors["w"]
    assert torch.equal(found, DECODED.bfloat16())
    assert calls == ["w"]
    assert staging_bytes(source.catalog["w"]) >= Q.numel()


def test_the_plan_counts_what_decoding_takes(inner):
    big = TensorSpec("w", "F32", (4096, 4096), "", encoding=None)
    parts = TensorSpec("q", "I8", big.shape, ""), TensorSpec("s", "F32", (32, 32), "")
    parts = tuple(
        TensorSpec(p.name, p.dtype, p.shape, "", extent=inner.catalog["w"].extent) for p in parts
    )
    encoding = Scaled(parts, "I8", code="I8", rows=4096, columns=4096, block=(128, 128))
    encoded = TensorSpec("w", "F32", big.shape, "", encoding=encoding)
    plain = TensorSpec("w", "F32", big.shape, "", extent=inner.catalog["w"].extent)
    count = values_at_once(encoding)
    assert count % 4096 == 0
    needs = []
    for spec in (plain, encoded):
        from streamload.core.specs import Catalog

        options = Settings(workers=2)
        needs.append(build_plan(Catalog({"w": spec}), None, None, options).memory.staging_bytes)
    more = needs[1] - needs[0]
    assert more == 2 * staging_bytes(encoded)
    # The values of a step, its numbers and their 16 bits, and a scale for each row's blocks.
    assert count * (4 + 1 + 2) < staging_bytes(encoded) < count * 12
