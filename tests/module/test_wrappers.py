"""Tensor subclasses as targets: wrappers are refused by class, mere attributes are kept."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.utils._pytree import tree_map

import streamload

STORED = {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3), "1.weight": torch.ones(2, 3)}


class Wrapped(torch.Tensor):
    """A wrapper subclass that torch cannot take apart by itself."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        args, kwargs = tree_map(
            lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {})
        )
        out = func(*args, **kwargs)
        return cls(out) if isinstance(out, torch.Tensor) else out


class Flattened(Wrapped):
    """One that it can."""

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Flattened(inner["inner"])


class Tagged(nn.Parameter):
    """A parameter with more attributes, and that is all."""


class TaggedTensor(torch.Tensor):
    """The same for a plain tensor."""


@pytest.fixture
def path(tmp_path):
    save_file(STORED, tmp_path / "m.safetensors")
    return str(tmp_path / "m.safetensors")


def build(device):
    with torch.device(device):
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("kind", [Wrapped, Flattened])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_wrappers_are_refused_by_class_and_all_are_listed(path, device, kind, is_buffer):
    module = build(device)
    if is_buffer:
        for owner in module:
            value = kind(owner.weight.detach())
            del owner.weight
            owner.register_buffer("weight", value)
    else:
        for owner in module:
            owner.weight = nn.Parameter(kind(owner.weight.detach()), requires_grad=False)
    before = dict(module.state_dict(keep_vars=True))
    plan = streamload.plan(module, path)
    assert not plan.ok
    told = [problem for problem in plan.problems if kind.__name__ in problem]
    assert [name for name in ("0.weight", "1.weight") if any(name in line for line in told)] == [
        "0.weight",
        "1.weight",
    ]
    assert all("load into the plain module first, then quantise or shard" in line for line in told)
    for strict in (True, False):
        with pytest.raises(streamload.PlanError, match=kind.__name__):
            streamload.load_into(module, path, strict=strict)
    after = dict(module.state_dict(keep_vars=True))
    assert all(after[name] is before[name] for name in before)


def test_a_wrapper_that_the_load_does_not_touch_is_left_alone(tmp_path):
    module = build("cpu")
    module[1].weight = nn.Parameter(Wrapped(module[1].weight.detach()), requires_grad=False)
    kept = module[1].weight
    first = {name: value for name, value in STORED.items() if name.startswith("0.")}
    save_file(first, tmp_path / "first.safetensors")
    streamload.load_into(module, tmp_path / "first.safetensors", strict=False)
    assert module[1].weight is kept
    assert torch.equal(module[0].weight, STORED["0.weight"])


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_subclasses_that_add_attributes_are_kept(tmp_path, device):
    module = build(device)
    tagged = torch.Tensor._make_subclass(Tagged, module[0].weight.detach(), True)
    tagged.rank = 3
    module[0].weight = tagged
    flagged = nn.Parameter(torch.Tensor._make_subclass(TaggedTensor, module[1].weight.detach()))
    flagged.note = "flag"
    module[1].weight = flagged
    scale = torch.Tensor._make_subclass(TaggedTensor, torch.zeros(2, device=device))
    scale.unit = "s"
    module[1].register_buffer("scale", scale)
    save_file({**STORED, "1.scale": torch.full((2,), 5.0)}, tmp_path / "m.safetensors")
    streamload.load_into(module, tmp_path / "m.safetensors")
    assert type(module[0].weight) is Tagged
    assert module[0].weight.rank == 3
    assert type(module[1].weight) is TaggedTensor
    assert isinstance(module[1].weight, nn.Parameter)
    assert module[1].weight.note == "flag"
    assert type(module[1].scale) is TaggedTensor
    assert module[1].scale.unit == "s"
    assert all(bool((t == 1).all()) for t in module.parameters())
    assert module[1].scale.tolist() == [5.0, 5.0]


def test_a_wrapper_is_not_exported(tmp_path):
    module = build("cpu")
    module[0].weight = nn.Parameter(Wrapped(module[0].weight.detach()), requires_grad=False)
    with pytest.raises(streamload.PlanError, match=r"'0\.weight'.*Wrapped"):
        streamload.export(module, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_sharded_modules_are_loaded(path, device):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = build(device)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for layer in module:
            fully_shard(layer, mesh=mesh)
        streamload.load_into(module, path)
        kinds = {type(parameter).__name__ for parameter in module.parameters()}
        assert kinds == {"DTensor"}
        assert all(bool((p.full_tensor() == 1).all()) for p in module.parameters())
    finally:
        dist.destroy_process_group()


def test_quantised_modules_are_refused(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    save_file({"0.weight": torch.ones(64, 64)}, tmp_path / "q.safetensors")
    for device in ("meta", "cpu"):
        module = nn.Sequential(nn.Linear(64, 64, bias=False, device=device))
        quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
        kind = type(module[0].weight).__name__
        with pytest.raises(streamload.PlanError, match=kind):
            streamload.load_into(module, tmp_path / "q.safetensors")
        assert type(module[0].weight).__name__ == kind
