"""Devices: which are there, several at once, other kinds by plain copies, and CUDA itself."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import streamload
from streamload.core.options import Settings
from streamload.engine.execute import execute
from streamload.engine.lanes.choice import DeviceLanes, unusable
from streamload.engine.lanes.device import DeviceLane, PlainOps
from streamload.planning.build import build_plan
from streamload.sources.in_memory import MemorySource
from tests.engine.fake_device import FakeOps
from tests.engine.test_ring import RULES, expected_tensors, run, stored_tensors

HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="torch sees no CUDA device here")
ABSENT = ["cuda:99", pytest.param("cuda", marks=pytest.mark.skipif(HAS_CUDA, reason="has CUDA"))]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    save_file(Model().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def empty_model():
    with streamload.empty_weights():
        return Model()


class TestAbsentDevices:
    @pytest.mark.parametrize("device", ABSENT)
    @pytest.mark.parametrize("in_map", [False, True])
    def test_refused_by_name_before_anything_moves(self, path, device, in_map):
        model = empty_model()
        where = {"": "cpu", "blocks.1": device} if in_map else device
        made = streamload.plan(model, path, device=where)
        assert not made.ok
        assert device in made.problems[0]
        with pytest.raises(streamload.PlanError, match=f"device '{device}' is not available here"):
            streamload.load_into(model, path, device=where)
        assert all(p.is_meta for p in model.parameters())

    def test_the_other_calls_refuse_them_too(self, path):
        for call in (streamload.load_state_dict, streamload.iter_tensors):
            with pytest.raises(streamload.StreamloadError, match="cuda:99"):
                call(path, device="cuda:99")

    def test_a_device_without_values_is_none(self, path):
        with pytest.raises(streamload.PlanError, match="'meta'"):
            streamload.load_into(empty_model(), path, device="meta")

    @pytest.mark.parametrize("device", ["gpu", "cuda:x", ""])
    def test_names_that_torch_does_not_know(self, path, device):
        with pytest.raises(streamload.PlanError, match=f"'{device}' is not one that torch knows"):
            streamload.load_into(empty_model(), path, device=device)

    def test_the_cpu_is_always_there(self):
        assert unusable("cpu") is None

    def test_the_cpu_has_no_number(self, path):
        report = streamload.load_into(empty_model(), path, device=torch.device("cpu:0"))
        assert report.device == "cpu"
        assert report.memory.peak_device_bytes == 0


def test_other_devices_by_plain_copies():
    stored = stored_tensors(3)
    found = run(PlainOps("cpu"), stored, dtype=torch.bfloat16, slots=2, workers=3).tensors
    for name, tensor in expected_tensors(stored, torch.bfloat16).items():
        assert torch.equal(found[name], tensor), name


def test_each_tensor_goes_to_its_own_device():
    stored = stored_tensors(1)
    source = MemorySource(stored)
    where = {"": "a", "left": "b", "turned.1": "b", "qk.2": "c"}
    options = Settings(device=where, workers=4, chunk_bytes=512, staging_bytes=1024)
    plan = build_plan(source.catalog, RULES, None, options)
    made = {"a": {}, "b": {}, "c": {}}

    class Noting(FakeOps):
        def __init__(self, seed, name):
            super().__init__(seed)
            self._into = made[name]

        def allocate(self, tensor):
            self._into[tensor.name] = super().allocate(tensor)
            return self._into[tensor.name]

    lanes = DeviceLanes(
        {n: DeviceLane(Noting(i, n), slots=1, slot_bytes=256) for i, n in enumerate(made)}
    )
    found = execute(plan, source, lanes).tensors
    for name, tensor in expected_tensors(stored, None).items():
        assert torch.equal(found[name], tensor), name
    assert set(made["b"]) == {"left.0", "left.1", "left.2", "turned.1"}
    assert set(made["c"]) == {"qk.2"}


@pytest.mark.gpu
@needs_cuda
class TestCuda:
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
    def test_every_tensor_is_right(self, dtype):
        from streamload.engine.lanes.cuda import CudaOps

        for seed in range(5):
            stored = stored_tensors(seed)
            found = run(CudaOps("cuda"), stored, dtype=dtype, slots=2, slot_bytes=4096).tensors
            for name, tensor in expected_tensors(stored, dtype).items():
                assert found[name].device.type == "cuda"
                assert torch.equal(found[name].cpu(), tensor), name

    def test_a_module_and_its_buffers(self, path):
        model = empty_model()
        report = streamload.load_into(model, path, device="cuda:0")
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
        assert report.memory.peak_device_bytes > 0

    def test_two_devices(self, path):
        model = empty_model()
        streamload.load_into(model, path, device={"": "cpu", "blocks": "cuda:0"})
        assert model.embed.weight.device.type == "cpu"
        assert model.blocks[1].weight.device.type == "cuda"

    def test_a_stream_of_the_callers_own_sees_the_values(self, path):
        expected = streamload.load_state_dict(path)["blocks.0.weight"]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = streamload.load_state_dict(path, device="cuda:0")["blocks.0.weight"] * 2
        stream.synchronize()
        assert torch.equal(found.cpu(), expected * 2)
