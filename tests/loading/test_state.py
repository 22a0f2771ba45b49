"""What a load leaves as it was, and what it fills: ties, buffers, flags, subclasses, in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import streamload
from tests.support.tiny import (
    Toy,
    assert_unchanged,
    bag,
    meta_toy,
    refused,
    same_bits,
    state_of,
    toy_tensors,
    values,
    write,
)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "toy.safetensors", toy_tensors())


def real_toy():
    return Toy()


BUILT = [meta_toy, real_toy]


@pytest.mark.parametrize("build", BUILT)
def test_flags_order_ties_and_kinds_are_kept(path, build):
    module = build()
    module.eval()
    module.drop.train()
    calls = []
    module.lin.register_forward_hook(lambda *_: calls.append(1))
    names = [n for n, _ in module.named_parameters(remove_duplicate=False)]
    flags = [m.training for m in module.modules()]
    assert streamload.load_into(module, path).ok
    assert [n for n, _ in module.named_parameters(remove_duplicate=False)] == names
    assert [m.training for m in module.modules()] == flags
    assert module.head.weight is module.emb.weight
    assert len(list(module.parameters())) == 4
    assert not module.frozen.weight.requires_grad
    assert module.lin.weight.requires_grad
    assert all(p.grad is None and type(p) is nn.Parameter for p in module.parameters())
    assert all(same_bits(module.state_dict()[n], t) for n, t in toy_tensors().items())
    module.lin(torch.ones(4))
    assert calls == [1]


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_buffers(path, dtype):
    module = meta_toy()
    mask, inv_freq = module.mask, module.inv_freq
    report = streamload.load_into(module, path, dtype=dtype)
    assert module.steps.item() == 123456789
    assert module.steps.dtype == torch.int64
    assert module.scale.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert module.scale.dtype == torch.float32
    assert module.inv_freq is inv_freq
    assert module.mask is mask
    assert module.inv_freq.tolist() == pytest.approx([1.0, 0.1])
    assert (report.missing, report.unfilled) == ((), ())
    if dtype:
        assert module.lin.weight.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("strict", [True, False])
def test_buffers_without_values_are_named(path, strict):
    with torch.device("meta"):
        module = Toy()
    made = streamload.plan(module, path, strict=strict)
    assert made.report.unfilled == ("inv_freq", "mask")
    assert made.ok is not strict
    text = "; ".join((*made.problems, *made.report.notices))
    assert "'inv_freq', 'mask'" in text
    assert "empty_weights()" in text
    if strict:
        with refused(path, module):
            streamload.load_into(module, path)
    else:
        streamload.load_into(module, path, strict=False)
        assert module.mask.is_meta
        assert not module.lin.weight.is_meta


def test_not_strict_leaves_what_is_missing_on_meta_and_says_so(tmp_path):
    tensors = {n: t for n, t in toy_tensors().items() if n not in ("lin.bias", "scale")}
    path = write(tmp_path / "toy.safetensors", tensors)
    with torch.device("meta"):
        module = Toy()
    bias = module.lin.bias
    report = streamload.load_into(module, path, strict=False)
    assert report.missing == ("lin.bias", "scale")
    assert set(report.unfilled) == {"lin.bias", "scale", "inv_freq", "mask"}
    assert module.lin.bias is bias
    assert same_bits(module.lin.weight, toy_tensors()["lin.weight"])
    assert "missing (2)" in report.to_text()


def test_values_are_copied_in_place(path):
    module = Toy()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before = {n: (id(p), p.data_ptr()) for n, p in module.named_parameters()}
    streamload.load_into(module, path)
    assert {n: (id(p), p.data_ptr()) for n, p in module.named_parameters()} == before
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} >= {id(module.lin.weight)}
    module.lin(torch.ones(4)).sum().backward()
    optimizer.step()
    assert torch.equal(module.lin.bias, toy_tensors()["lin.bias"] - 1)


@pytest.mark.parametrize("own", [torch.float16, torch.bfloat16, torch.float64])
def test_its_own_dtype_is_kept_in_place(path, own):
    module = Toy().to(own)
    streamload.load_into(module, path)
    assert same_bits(module.lin.weight, toy_tensors()["lin.weight"].to(own))
    assert module.steps.item() == 123456789


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"mode": "map"}, {"layout": "stored"}])
def test_options_that_need_new_tensors_are_refused_in_place(path, options):
    module = Toy()
    with refused(path, module) as caught:
        streamload.load_into(module, path, **options)
    assert "empty_weights" in str(caught[0])


def test_transposed_and_odd_strides_in_place(tmp_path):
    w = values(1, 6, 4)
    path = write(tmp_path / "x.safetensors", {"w": w})
    for storage in (torch.zeros(4, 6).t(), torch.zeros(6, 8)[:, ::2], torch.zeros(9, 4)[2:8]):
        module = nn.Module()
        module.w = nn.Parameter(storage)
        streamload.load_into(module, path, chunk_bytes=16)
        assert torch.equal(module.w, w)
        assert module.w.data_ptr() == storage.data_ptr()
        rest = storage.untyped_storage().nbytes() // 4 - w.numel()
        flat = torch.empty(0).set_(storage.untyped_storage())
        assert int((flat == 0).sum()) >= rest, "nothing beside the view is written"


class Odd(nn.Parameter):
    """A subclass whose constructor nobody knows."""

    def __new__(cls, data, requires_grad, note):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.note = note
        return made


def test_parameter_subclasses_and_attributes_are_kept(tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": values(1, 2), "v": values(2, 2)})
    with streamload.empty_weights():
        module = nn.Module()
        module.w = Odd(torch.zeros(2), False, "kept")
        module.v = nn.Parameter(torch.zeros(2))
        module.v.tp_dim = 1
    streamload.load_into(module, path)
    assert type(module.w) is Odd
    assert (module.w.note, module.v.tp_dim) == ("kept", 1)
    assert not module.w.requires_grad
    assert same_bits(module.w.detach().as_subclass(torch.Tensor), values(1, 2))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_compute_with_what_was_loaded(tmp_path, kind):
    torch.manual_seed(0)
    reference = kind(3, 4, num_layers=2)
    path = write(tmp_path / "x.safetensors", reference.state_dict())
    with streamload.empty_weights():
        module = kind(3, 4, num_layers=2)
    before = list(module._flat_weights)
    with pytest.raises(RuntimeError, match="stop"):
        streamload.load_into(module, path, on_assign=stop_at("weight_hh_l1"))
    assert all(a is b for a, b in zip(module._flat_weights, before, strict=True))
    streamload.load_into(module, path)
    x = torch.ones(2, 5, 3)
    assert torch.equal(module(x)[0], reference(x)[0])


def stop_at(name):
    def hook(stored, target):
        if target == name:
            raise RuntimeError("stop")

    return hook


def test_weights_without_plain_memory_are_refused_by_name(tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": values(1, 2, 2)})
    module = nn.Module()
    module.w = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(streamload.PlanError, match=r"x\.safetensors: 'w'.*sparse"):
        streamload.load_into(module, path)
    lazy = nn.LazyLinear(3)
    with pytest.raises(streamload.PlanError, match="lazy"):
        streamload.load_into(lazy, path)


class TestTies:
    def tied(self, device="meta"):
        return bag({"wte.weight": (4, 2)}, tied={"lm_head.weight": "wte.weight"}, device=device)

    @pytest.mark.parametrize("device", ["meta", "cpu"])
    @pytest.mark.parametrize("name", ["wte.weight", "lm_head.weight"])
    def test_one_name_fills_both(self, tmp_path, name, device):
        path = write(tmp_path / "x.safetensors", {name: values(1, 4, 2)})
        module = self.tied(device)
        report = streamload.load_into(module, path)
        assert report.missing == ()
        assert module.lm_head.weight is module.wte.weight
        assert same_bits(module.wte.weight, values(1, 4, 2))
        assert report.tied == (("wte.weight", "lm_head.weight"),)

    @pytest.mark.parametrize("swapped", [False, True])
    @pytest.mark.parametrize("chunk_bytes", [1, 8, None])
    def test_equal_ones_load_and_differing_ones_are_refused(self, tmp_path, swapped, chunk_bytes):
        one, two = values(1, 4, 2), values(1, 4, 2)
        names = ["wte.weight", "lm_head.weight"][:: -1 if swapped else 1]
        path = write(tmp_path / "x.safetensors", dict(zip(names, (one, two), strict=True)))
        module = self.tied()
        assert streamload.load_into(module, path, chunk_bytes=chunk_bytes).ok
        two[3, 1] += 1
        path = write(tmp_path / "y.safetensors", {"wte.weight": one, "lm_head.weight": two})
        module = self.tied()
        with refused(path, module, streamload.CheckpointError) as caught:
            streamload.load_into(module, path, chunk_bytes=chunk_bytes)
        assert "'lm_head.weight' differs from 'wte.weight'" in str(caught[0])
        report = streamload.load_into(module, path, ties="keep")
        assert same_bits(module.lm_head.weight, one)
        assert any("'wte.weight' was kept" in n for n in report.notices)

    def test_the_order_in_the_file_never_decides(self, tmp_path):
        from tests.support.tiny import container, entry

        raw = {
            n: bytes(values(i, 4, 2).view(torch.uint8).flatten().tolist())
            for i, n in enumerate("ab")
        }
        for first, second in (("wte.weight", "lm_head.weight"), ("lm_head.weight", "wte.weight")):
            header = {first: entry("F32", [4, 2], 0, 32), second: entry("F32", [4, 2], 32, 64)}
            body = {"wte.weight": raw["a"], "lm_head.weight": raw["b"]}
            path = tmp_path / "x.safetensors"
            path.write_bytes(container(header, body[first] + body[second]))
            module = self.tied()
            with refused(path, module, streamload.CheckpointError):
                streamload.load_into(module, path)
            streamload.load_into(module, path, ties="keep")
            assert same_bits(module.wte.weight, values(0, 4, 2))

    def test_a_nan_is_equal_to_itself(self, tmp_path):
        nan = torch.full((4, 2), float("nan"))
        path = write(tmp_path / "x.safetensors", {"wte.weight": nan, "lm_head.weight": nan})
        assert streamload.load_into(self.tied(), path).ok

    def test_ones_of_other_dtypes_are_compared_as_they_would_be(self, tmp_path):
        one = values(1, 4, 2)
        path = write(tmp_path / "x.safetensors", {"wte.weight": one, "lm_head.weight": one.half()})
        assert streamload.load_into(self.tied(), path, dtype="bfloat16").ok

    def test_an_untied_model_is_never_filled_from_the_embedding(self, tmp_path):
        path = write(tmp_path / "x.safetensors", {"wte.weight": values(1, 4, 2)})
        module = bag({"wte.weight": (4, 2), "lm_head.weight": (4, 2)})
        with refused(path, module) as caught:
            streamload.load_into(module, path)
        assert caught[0].report.missing == ("lm_head.weight",)
        report = streamload.load_into(module, path, strict=False)
        assert module.lm_head.weight.is_meta
        assert report.unfilled == ("lm_head.weight",)

    def test_two_parameters_on_one_memory_are_a_tie(self, tmp_path):
        module = bag({"a": (4, 2)}, device="cpu")
        module.register_parameter("b", nn.Parameter(module.a.detach()))
        path = write(tmp_path / "x.safetensors", {"a": values(1, 4, 2)})
        streamload.load_into(module, path)
        assert same_bits(module.b, values(1, 4, 2))

    def test_a_copied_module_is_not_tied_to_the_first(self, path):
        first = Toy()
        second = copy.deepcopy(first)
        before = state_of(second)
        streamload.load_into(first, path)
        assert_unchanged(second, before)


def test_kinds_that_differ_are_refused(tmp_path):
    tensors = toy_tensors() | {"lin.weight": (toy_tensors()["lin.weight"] * 64).int()}
    path = write(tmp_path / "x.safetensors", tensors)
    for build in BUILT:
        module = build()
        with refused(path, module) as caught:
            streamload.load_into(module, path)
        assert "'lin.weight'" in str(caught[0])


DEVICES = [
    ({"emb": "cpu", "lin": "cpu"}, ["'head.weight'", "'frozen.weight'"]),
    ({"": "cpu", "nope": "cpu"}, ["'nope'"]),
    ({"emb": "cpu", "head": "meta", "": "cpu"}, ["'emb.weight' and 'head.weight'"]),
    ({"": "cuda:99"}, ["cuda:99"]),
    ("cuda:99", ["cuda:99"]),
    ("nonsense", ["nonsense"]),
    ("meta", ["meta"]),
    ("xpu", ["xpu"]),
]


@pytest.mark.parametrize(("device", "says"), DEVICES)
def test_devices_at_fault_are_refused_while_planning(path, device, says):
    module = meta_toy()
    with refused(path, module) as caught:
        streamload.load_into(module, path, device=device)
    assert all(word in str(caught[0]) for word in says)
    assert not streamload.plan(module, path, device=device).ok
    with pytest.raises(streamload.PlanError):
        streamload.load_state_dict(path, device=device if isinstance(device, str) else "cuda:99")


@pytest.mark.parametrize("device", ["cpu", None, torch.device("cpu"), {"": "cpu"}, {"": None}])
def test_the_default_device(path, device):
    module = meta_toy()
    assert streamload.load_into(module, path, device=device).ok
    assert {p.device.type for p in module.parameters()} == {"cpu"}
