"""Devices: which are there, several at once, other kinds by plain copies, and CUDA itself."""

import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import streamload
from streamload.core.options import Settings
from streamload.core.specs import StridedCopy
from streamload.engine.execute import execute
from streamload.engine.lanes import plain
from streamload.engine.lanes.choice import settled, unusable
from streamload.engine.lanes.device import DeviceLane
from streamload.engine.lanes.moves import scatter
from streamload.engine.lanes.plain import PlainOps
from streamload.engine.lanes.several import DeviceLanes
from streamload.engine.on_layer import Replacements
from streamload.engine.reduce import reduce_into
from streamload.loading import iterating
from streamload.module.commit import commit
from streamload.module.targets import targets_of
from streamload.planning.build import build_plan
from streamload.planning.records import Plan, PlannedTensor
from streamload.sources.in_memory import MemorySource
from tests.engine.devices.fake_device import FakeOps
from tests.engine.devices.rounds import DEVICE, RULES, expected_tensors, load, stored_tensors

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

    @pytest.mark.parametrize("device", ["cuda:x", ""])
    def test_names_that_torch_does_not_know(self, path, device):
        with pytest.raises(streamload.PlanError, match=f"'{device}' is not one that torch knows"):
            streamload.load_into(empty_model(), path, device=device)

    def test_the_cpu_is_always_there(self):
        assert unusable("cpu") is None

    def test_the_cpu_has_no_number(self, path):
        report = streamload.load_into(empty_model(), path, device=torch.device("cpu:0"))
        assert report.device == "cpu"
        assert report.memory.peak_device_bytes == 0


@pytest.fixture
def two_cuda_devices(monkeypatch):
    """As torch tells of a machine with two, the second of which is the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


class TestOneNameForEachDevice:
    @pytest.mark.parametrize(
        ("device", "held", "expected"),
        [
            ("cuda", (), "cuda:1"),
            ("cuda:0", (), "cuda:0"),
            ("cuda", {"cuda:0", "cpu"}, "cuda:0"),  # where the module is
            ("cuda", {"cuda:0", "cuda:1"}, "cuda:1"),
            ("cuda:7", (), "cuda:7"),  # refused by the name that was given
            ("cpu", (), "cpu"),
            ("gpu", (), "gpu"),
            (
                {"": "cpu", "a": "cuda", "b": "cuda:1"},
                (),
                {"": "cpu", "a": "cuda:1", "b": "cuda:1"},
            ),
        ],
    )
    def test_without_a_number_it_is_the_current_one(self, two_cuda_devices, device, held, expected):
        assert settled(Settings(device=device), held).device == expected

    def test_a_tie_may_be_on_one_device_under_both_names(self, path, two_cuda_devices):
        model = empty_model()
        model.head = model.blocks[0]
        where = {"": "cpu", "blocks.0": "cuda", "head": "cuda:1"}
        made = streamload.plan(model, path, device=where, strict=False)
        assert made.ok, made.problems
        assert {t.device for t in made.tensors} == {"cpu", "cuda:1"}
        assert made.memory.staging_bytes < 2 * made.options.ring_bytes


class TestDtypesThatADeviceHasNot:
    @pytest.fixture(autouse=True)
    def _no_doubles(self, monkeypatch):
        """A kind of device that is there and, as MPS, has no 64-bit floats."""
        inner = torch.empty

        def empty(*sizes, dtype=None, device=None, **options):
            if torch.device(device or "cpu").type == "xpu":
                if dtype == torch.float64:
                    raise TypeError("Cannot convert to it: no float64.\nUse float32 instead.")
                device = "cpu"
            return inner(*sizes, dtype=dtype, device=device, **options)

        monkeypatch.setattr(torch, "empty", empty)

    def test_refused_before_anything_moves(self, path):
        model = empty_model()
        made = streamload.plan(model, path, device="xpu:0", dtype="float64")
        assert made.problems == (
            "'blocks.0.bias': device 'xpu:0' cannot hold F64: Cannot convert to it: no float64.; "
            "dtype= casts it",
        )
        assert streamload.plan(model, path, device="xpu:0", dtype="float32").ok


def test_a_buffer_that_several_modules_share_stays_one():
    model = empty_model()
    shared = torch.arange(4.0)
    for block in model.blocks:
        block.register_buffer("angles", shared)
    model.register_buffer("view", shared[:4])  # another object over the same memory
    source = MemorySource(Model().state_dict())
    plan = build_plan(source.catalog, None, targets_of(model), Settings(device="meta"))
    tensors = {t.name: torch.empty(t.shape, device="meta") for t in plan.tensors}
    commit(model, plan, Replacements(tensors))
    found = [model.view, *(block.angles for block in model.blocks)]
    assert all(tensor.is_meta and tensor is found[0] for tensor in found)


def test_threads_work_with_the_device_of_their_lane(path):
    """On CUDA a thread starts on device 0; what it calls there would make a context."""
    bound = []

    class Binding(FakeOps):
        def bind(self):
            super().bind()
            bound.append(threading.current_thread().name)

    load(Binding(device=DEVICE), stored_tensors(0))
    assert bound
    assert all(name.startswith("streamload-") for name in bound)

    class Unbound(FakeOps):
        def bind(self):
            pass

    with pytest.raises(AssertionError, match="not bound"):
        load(Unbound(device=DEVICE), stored_tensors(0))


class TestSumsAndMeans:
    """Partitions that are added up are added up on the host, wherever the target is."""

    @pytest.mark.parametrize("reduces", ["sum", "mean"])
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
    )
    def test_the_target_is_only_written(self, reduces, dtype):
        parts = [torch.tensor([1.0, 6e4, -2.5]), torch.tensor([2.0, 6e4, 0.5])]
        source = MemorySource({"0": parts[0], "1": parts[1]})
        copies = tuple(StridedCopy(n, (3,), (1,), 0, (1,), 0) for n in ("0", "1"))
        planned = PlannedTensor(
            "t", (), ("0", "1"), (3,), (1,), "F32", "F32", copies, reduces=reduces
        )
        plan = Plan((planned,), (), Settings(), dict(source.catalog.tensors))
        target = torch.empty(3, dtype=dtype, device="meta")  # any look at it raises
        expected = sum(parts) / (2 if reduces == "mean" else 1)
        lost = int((~expected.to(dtype).float().isfinite()).sum())
        assert reduce_into(plan, source, planned, target) == lost


class TestPlainCopies:
    def test_every_tensor_is_right(self):
        stored = stored_tensors(3)
        found = load(PlainOps("cpu"), stored, dtype=torch.bfloat16, slots=2, workers=3).tensors
        for name, tensor in expected_tensors(stored, torch.bfloat16).items():
            assert torch.equal(found[name], tensor), name

    def test_one_thread_at_a_time_writes_and_counts(self, monkeypatch):
        inside, most = [], []

        def slowly(move):
            inside.append(move)
            most.append(len(inside))
            time.sleep(0.0005)
            scatter(move)
            inside.remove(move)

        monkeypatch.setattr(plain, "scatter", slowly)
        stored = stored_tensors(0) | {"plain.0": torch.full((64, 64), 1e30)}
        done = load(PlainOps("cpu"), stored, dtype=torch.float16, slots=8, workers=8)
        assert set(most) == {1}
        assert done.notices == ("'plain.0': 4096 finite values overflow F16",)

    def test_staging_is_what_was_read(self):
        """Nothing is copied from one host buffer to another on the way."""

        class Counting(PlainOps):
            scratches = 0

            def scratch(self, nbytes, stream):
                self.scratches += 1
                return super().scratch(nbytes, stream)

        ops = Counting("cpu")
        load(ops, stored_tensors(0), slot_bytes=4096)
        assert not ops.scratches


class TestOneTensorAfterTheOther:
    @pytest.fixture
    def ops(self, monkeypatch):
        made = FakeOps(5, device="cuda:1")
        lanes = []

        def lane_for(devices, options):
            assert list(devices) == ["cuda:1"]
            lanes.append(DeviceLane(made, slots=3, slot_bytes=64))
            return lanes[-1]

        monkeypatch.setattr(iterating, "lane_for", lane_for)
        monkeypatch.setattr(iterating, "_making", lambda _: torch.no_grad())
        yield made
        assert len(lanes) == 1

    def test_all_go_through_one_ring(self, path, ops, two_cuda_devices):
        expected = dict(streamload.iter_tensors(path, dtype="float16"))
        ops.host_bytes = 0
        found = {}
        for name, tensor in streamload.iter_tensors(path, device="cuda", dtype="float16"):
            ops.synchronize(ops.record(ops.current()))  # what the caller's own work would do
            found[name] = tensor
            assert torch.equal(tensor, expected[name]), name
        assert list(found) == list(expected)
        assert ops.host_bytes <= 3 * 64
        assert not ops.queued

    def test_one_that_is_given_up_midway_leaves_nothing_under_way(
        self, path, ops, two_cuda_devices
    ):
        found = streamload.iter_tensors(path, device="cuda", prefix="blocks")
        name, _ = next(found)
        assert name == "0.bias"
        found.close()
        assert not ops.queued


def test_each_tensor_goes_to_its_own_device():
    stored = stored_tensors(1)
    source = MemorySource(stored)
    where = {"": "a", "left": "b", "turned.1": "b", "qk.2": "c"}
    options = Settings(device=where, workers=4, chunk_bytes=512, staging_bytes=1024)
    plan = build_plan(source.catalog, RULES, None, options)
    made = {"a": {}, "b": {}, "c": {}}

    class Noting(FakeOps):
        def __init__(self, seed, name):
            super().__init__(seed, device=name)
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


class TestCudaOperations:
    """What is asked of torch, by a torch that only writes it down."""

    @pytest.fixture
    def ops(self, monkeypatch):
        from streamload.engine.lanes import cuda

        self.asked, self.here, self.kept, self.fails = [], [0], 0, False

        def empty(nbytes, *, dtype, device, pin_memory=False):
            self.asked.append((nbytes, str(device), pin_memory))
            if self.fails:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return torch.zeros(1, dtype=dtype)

        monkeypatch.setattr(cuda.torch, "empty", empty)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: 100 + self.kept)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda d: 100)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (7, 10))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.here[-1])
        monkeypatch.setattr(torch.cuda, "set_device", self.here.append)
        monkeypatch.setattr(torch.cuda, "Stream", lambda d: object())
        monkeypatch.setattr(cuda, "_STREAMS", {})
        return cuda.CudaOps("cuda:1")

    def test_memory_is_reserved_once_unless_torch_has_kept_enough(self, ops):
        sizes = [4 << 20, 100, (2 << 20) + 1]  # small ones share segments of torch's own
        nbytes = (4 << 20) + (2 << 20) + 512
        ops.reserve(sizes)
        assert self.asked == [(nbytes, "cuda:1", False)]
        self.kept = nbytes
        ops.reserve(sizes)
        ops.reserve([])
        assert len(self.asked) == 1
        self.kept, self.fails = nbytes - 1, True
        ops.reserve(sizes)  # what does not fit in one piece is no error
        assert len(self.asked) == 2

    def test_what_torch_keeps_counts_as_free(self, ops):
        self.kept = 50
        assert ops.free_bytes() == 57

    def test_streams_stay_for_each_device(self, ops):
        from streamload.engine.lanes.cuda import CudaOps

        first = ops.streams()
        assert first == CudaOps("cuda:1").streams() == ops.streams()
        assert first != CudaOps("cuda:0").streams()

    def test_a_thread_is_set_to_its_device_once(self, ops):
        ops.bind()
        ops.bind()
        assert self.here == [0, 1]

    def test_only_the_ring_is_page_locked(self, ops):
        ops.host(64)
        ops.pageable(64)
        assert [(device, pinned) for _, device, pinned in self.asked] == [
            ("cpu", True),
            ("cpu", False),
        ]


@pytest.mark.gpu
@needs_cuda
class TestCuda:
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
    def test_every_tensor_is_right(self, dtype):
        from streamload.engine.lanes.cuda import CudaOps

        for seed in range(5):
            stored = stored_tensors(seed)
            found = load(CudaOps("cuda:0"), stored, dtype=dtype, slots=2, slot_bytes=4096).tensors
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
