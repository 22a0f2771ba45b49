"""Streaming and mapping: values, what is read, progress, threads, global state."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from safetensors import safe_open

import streamload
from streamload import MemorySource, NameMap, Rule, Transpose
from streamload.core.options import Settings
from streamload.engine.execute import execute
from streamload.engine.lanes.cpu import CpuLane
from streamload.planning.build import build_plan
from streamload.sources import files
from tests.support.tiny import (
    bag,
    gpt2_tensors,
    meta_gpt2,
    open_descriptors,
    same_bits,
    values,
    with_masks,
    write,
    write_gpt2,
)

MIXED = {
    "f32": values(1, 40, 30),
    "bf16": values(2, 33).bfloat16(),
    "f16": values(3, 5, 5, 5).half(),
    "f64": values(4, 7).double(),
    "i64": torch.tensor([1, -(2**62), 2**53 + 1]),
    "u8": torch.arange(255, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "c64": torch.tensor([1 - 2j, 0j]),
    "f8": values(5, 9).to(torch.float8_e4m3fn),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(-2.5),
}


@pytest.mark.parametrize("chunk_bytes", [1, 3, 100, 1 << 20])
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_streaming_gives_safe_opens_values(tmp_path, chunk_bytes, workers):
    path = write(tmp_path / "x.safetensors", MIXED)
    found = streamload.load_state_dict(path, chunk_bytes=chunk_bytes, workers=workers)
    with safe_open(path, framework="pt") as file:
        assert set(found) == set(file.keys())
        for name in file.keys():  # noqa: SIM118
            assert same_bits(found[name], file.get_tensor(name))
            assert found[name].is_contiguous()
    assert list(found) == [n for n, _ in streamload.iter_tensors(path)], "the file's order"


def test_every_tensor_has_its_own_storage(tmp_path):
    path = write(
        tmp_path / "x.safetensors", {f"t{i}": torch.full((64, 64), float(i)) for i in range(24)}
    )
    for _ in range(5):
        found = streamload.load_state_dict(path, chunk_bytes=4096, workers=8)
        assert all((t == int(name[1:])).all() for name, t in found.items())
        assert len({t.untyped_storage().data_ptr() for t in found.values()}) == 24
        assert all(t.untyped_storage().nbytes() == 64 * 64 * 4 for t in found.values())


def test_a_short_tensor_behind_a_long_one_has_no_tail_of_it(tmp_path):
    tensors = {f"s{i}": torch.full((2 ** (i % 9), 3), float(i + 1)) for i in range(24)}
    path = write(tmp_path / "x.safetensors", tensors)
    found = streamload.load_state_dict(path, dtype="float16", chunk_bytes=1000, workers=3)
    assert all((found[name] == t.half()).all() for name, t in tensors.items())


@pytest.mark.parametrize("layout", ["contiguous", "stored"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("staging_bytes", [1, 100, 1 << 20])
def test_transposes_in_panels(layout, dtype, staging_bytes):
    w = values(1, 23, 31)
    source = MemorySource({"w": w})
    from streamload.core.dtypes import parse_dtype

    options = Settings(
        layout=layout, dtype=parse_dtype(dtype), staging_bytes=staging_bytes, chunk_bytes=60
    )
    plan = build_plan(source.catalog, NameMap((Rule("w", "w", Transpose()),)), None, options)
    made = execute(plan, source, CpuLane(chunk_bytes=60)).tensors["w"]
    expected = w.t() if dtype is None else w.t().bfloat16()
    assert torch.equal(made, expected)
    assert made.is_contiguous() is (layout == "contiguous")
    assert made.t().is_contiguous() is (layout == "stored")


class Recording(MemorySource):
    """Notes what is read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.read: list[tuple[str, int]] = []

    def held(self, name):
        return None  # as a file: everything is read

    def read_into(self, extent, buffer, *, tensor=None):
        self.read.append((tensor, extent.nbytes))
        super().read_into(extent, buffer, tensor=tensor)


def test_masks_are_never_read():
    from streamload.mapping.tables.gpt2_names import gpt2_map
    from streamload.module.targets import targets_of

    wanted = gpt2_tensors()
    source = Recording(with_masks(wanted, torch.uint8))
    plan = build_plan(source.catalog, gpt2_map({"n_layer": 2}), targets_of(meta_gpt2()))
    plan.raise_if_refused()
    assert len(plan.report.ignored) == 4
    run = execute(plan, source, CpuLane(chunk_bytes=64))
    assert {name for name, _ in source.read} == set(wanted)
    planned = sum(t.numel() * 4 for t in wanted.values())
    assert sum(n for _, n in source.read) == run.bytes_read == run.bytes_written == planned


def test_the_report_counts_the_planned_bytes_alone(tmp_path):
    folder = write_gpt2(tmp_path, with_masks(gpt2_tensors(), torch.float32))
    report = streamload.load(folder, dtype="bfloat16").report
    planned = sum(t.numel() for t in gpt2_tensors().values())
    assert (report.bytes_read, report.bytes_written) == (4 * planned, 2 * planned)


def test_only_the_chosen_layers_are_read(tmp_path):
    folder = write_gpt2(tmp_path)
    whole = streamload.load(folder, mode="stream").report.bytes_read
    one = streamload.load(folder, layers=[1], mode="stream")
    layer = sum(t.numel() * 4 for n, t in gpt2_tensors().items() if n.startswith("h.1."))
    assert one.report.bytes_read == whole - layer
    assert torch.equal(one.model.blocks[0].ln1.scale, gpt2_tensors()["h.1.ln_1.weight"])


@pytest.mark.parametrize("workers", [1, 4])
def test_progress_grows_to_the_whole_and_comes_from_the_callers_thread(tmp_path, workers):
    folder = write_gpt2(tmp_path)
    told = []
    report = streamload.load(
        folder,
        mode="stream",
        workers=workers,
        chunk_bytes=16,
        progress=lambda *step: told.append((*step, threading.current_thread())),
    ).report
    done = [step[0] for step in told]
    assert done == sorted(done)
    assert told[-1][:2] == (report.bytes_read, report.bytes_read)
    assert {step[1] for step in told} == {report.bytes_read}
    assert {step[3] for step in told} == {threading.current_thread()}
    assert told[-1][2] in gpt2_tensors()


class TestMap:
    def test_views_of_the_file_take_no_memory_of_their_own(self, tmp_path):
        path = write(tmp_path / "x.safetensors", MIXED)
        found = streamload.load_state_dict(path, mode="map")
        assert all(same_bits(found[name], t) for name, t in MIXED.items())
        with open("/proc/self/maps") as maps:
            assert sum(path in line for line in maps) == 1

    @pytest.mark.parametrize("shape", [(1, 4), (4, 1), (1, 1), (1,), (2, 1, 3)])
    @pytest.mark.parametrize("layout", [None, "contiguous", "stored"])
    def test_sizes_of_one_are_mapped_too(self, tmp_path, shape, layout):
        path = write(tmp_path / "x.safetensors", {"w": values(1, *shape)})
        module = bag({"w": shape})
        report = streamload.load_into(module, path, mode="map", layout=layout)
        assert not report.notices
        assert report.bytes_read == 0
        assert same_bits(module.w, values(1, *shape))

    def test_what_cannot_be_mapped_is_streamed_and_told(self, tmp_path):
        folder = write_gpt2(tmp_path)
        loaded = streamload.load(folder, mode="map", dtype="bfloat16")
        assert any("not mapped but streamed" in n for n in loaded.report.notices)
        assert loaded.model.tok_embed.weight.dtype == torch.bfloat16
        strided = streamload.load(folder, mode="map")
        weight = strided.model.blocks[0].attn.qkv.weight
        assert weight.t().is_contiguous()
        assert torch.equal(weight, gpt2_tensors()["h.0.attn.c_attn.weight"].t())
        assert strided.report.bytes_read == 0

    def test_writing_to_a_mapped_weight_does_not_reach_the_file(self, tmp_path):
        folder = write_gpt2(tmp_path)
        with torch.no_grad():
            streamload.load(folder, mode="map").model.tok_embed.weight.fill_(3.0)
        again = streamload.load(folder, mode="map").model
        assert torch.equal(again.tok_embed.weight, gpt2_tensors()["wte.weight"])


class TestNothingIsLeft:
    def test_no_mapping_no_descriptor_no_thread(self, tmp_path):
        folder = write_gpt2(tmp_path)
        before = open_descriptors(), threading.active_count()
        loaded = streamload.load(folder, mode="stream")
        assert (open_descriptors(), threading.active_count()) == before
        with open("/proc/self/maps") as maps:
            assert str(tmp_path) not in maps.read()
        assert loaded.report.ok

    def test_thirty_loads_do_not_grow(self, tmp_path):
        path = write(tmp_path / "x.safetensors", {f"t{i}": torch.ones(256, 256) for i in range(8)})

        def resident():
            gc.collect()
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        for _ in range(5):
            streamload.load_state_dict(path, dtype="bfloat16", workers=2, chunk_bytes=65536)
        before = resident(), open_descriptors(), threading.active_count()
        for _ in range(30):
            streamload.load_state_dict(path, dtype="bfloat16", workers=2, chunk_bytes=65536)
        grown = resident() - before[0]
        assert grown < 4 << 20, f"{grown} bytes"
        assert (open_descriptors(), threading.active_count()) == before[1:]


class TestGlobalState:
    def state(self):
        fresh = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            fresh[0],
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.nn.Module.register_parameter,
        )

    @pytest.mark.parametrize("fails", [False, True])
    @pytest.mark.parametrize("threads", [1, 2, 3])
    def test_it_is_as_it_was(self, tmp_path, fails, threads, monkeypatch):
        folder = write_gpt2(tmp_path)
        own = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            before = self.state()
            if fails:
                monkeypatch.setattr(files.OpenFile, "read_into", broken)
                with pytest.raises(OSError, match="broken"):
                    streamload.load_state_dict(folder, workers=4, chunk_bytes=16)
            else:
                streamload.load(folder, workers=4, chunk_bytes=16)
            assert self.state() == before
        finally:
            torch.set_num_threads(own)

    @pytest.mark.parametrize(
        "context",
        [
            lambda: torch.device("meta"),
            torch.inference_mode,
            torch.no_grad,
            lambda: torch.autocast("cpu"),
        ],
    )
    def test_the_callers_context_does_not_reach_the_weights(self, tmp_path, context):
        folder = write_gpt2(tmp_path)
        with context():
            model = streamload.load(folder).model
            tensors = dict(streamload.iter_tensors(folder))
            mapped = streamload.load_state_dict(folder, dtype="bfloat16")
        for tensor in (*model.parameters(), *tensors.values(), *mapped.values()):
            assert tensor.device.type == "cpu"
            assert not tensor.is_inference()
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
        model.tok_embed.weight.sum().backward()

    def test_another_default_dtype_changes_nothing(self, tmp_path):
        path = write(tmp_path / "x.safetensors", MIXED)
        torch.set_default_dtype(torch.float64)
        try:
            found = streamload.load_state_dict(path)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(same_bits(found[name], t) for name, t in MIXED.items())


_READ = files.OpenFile.read_into


def broken(self, offset, buffer, *, tensor=None):
    if tensor is not None:
        raise OSError("broken")
    _READ(self, offset, buffer, tensor=tensor)


class TestTogether:
    def test_two_loads_in_threads(self, tmp_path):
        one = write(
            tmp_path / "one.safetensors",
            {f"t{i}": torch.full((64, 64), float(i)) for i in range(12)},
        )
        two = write(
            tmp_path / "two.safetensors",
            {f"s{i}": torch.full((2**i, 3), float(i)) for i in range(9)},
        )
        wrong, devices = [], []

        def load(path, dtype):
            for _ in range(10):
                found = streamload.load_state_dict(path, dtype=dtype, chunk_bytes=4096, workers=3)
                if not all((t == int(n[1:])).all() for n, t in found.items()):
                    wrong.append(path)

        def build():
            for _ in range(30):
                devices.append(torch.nn.Linear(1, 1).weight.device.type)

        threads = [
            threading.Thread(target=load, args=(one, "float16")),
            threading.Thread(target=load, args=(two, "float32")),
            threading.Thread(target=build),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert set(devices) == {"cpu"}

    def test_parent_and_forked_child_read_one_source(self, tmp_path):
        path = write(
            tmp_path / "x.safetensors", {f"t{i}": torch.full((64, 64), float(i)) for i in range(12)}
        )
        with streamload.open_checkpoint(path) as source:
            plan = build_plan(source.catalog, None, None, Settings(chunk_bytes=512))

            def right():
                made = execute(plan, source, CpuLane(chunk_bytes=512)).tensors
                return all((t == int(n[1:])).all() for n, t in made.items())

            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = 0 if all(right() for _ in range(5)) else 2
                finally:
                    os._exit(code)
            assert all(right() for _ in range(5))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_reductions_count_as_progress(tmp_path):
    from streamload import Sum

    parts = {f"p{i}": torch.full((5,), float(i)) for i in range(3)}
    source, told = MemorySource({**parts, "w": torch.ones(7)}), []
    table = NameMap((Rule(tuple(parts), "sum", Sum()), Rule("w", "w")))
    plan = build_plan(source.catalog, table, None)
    run = execute(plan, source, CpuLane(chunk_bytes=64), progress=lambda *step: told.append(step))
    assert run.tensors["sum"].tolist() == [3.0] * 5
    assert told[-1][0] == told[-1][1] == run.bytes_read == 88


def test_where_nothing_is_read_there_is_no_progress_to_tell(tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": torch.ones(3)})
    told = []
    streamload.load_into(
        bag({"w": (3,)}), path, mode="map", progress=lambda *step: told.append(step)
    )
    assert not told
