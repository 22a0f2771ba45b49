"""on_layer: what it is given and when, what it may give back, and what happens when it fails."""

import gc
import threading
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import streamload
from streamload.engine.groups import AHEAD
from tests.engine.devices.fake_device import FakeOps

BLOCKS = 12


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)


class Model(nn.Module):
    def __init__(self, blocks=BLOCKS, width=8):
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.h = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def values():
    torch.manual_seed(1)
    return {n: t for n, t in Model().state_dict().items() if n != "head.weight"}


@pytest.fixture
def path(tmp_path, values):
    # By name: h.0, h.1, h.10, h.11, h.2, ...
    save_file(dict(sorted(values.items())), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def empty_model(**sizes):
    with streamload.empty_weights():
        return Model(**sizes)


def is_untouched(model):
    return all(p.is_meta for p in model.parameters()) and model.head.weight is model.embed.weight


@pytest.mark.parametrize("workers", [1, 4])
def test_blocks_come_complete_and_in_order_from_the_calling_thread(path, values, workers):
    model = empty_model()
    seen = []

    def on_layer(layer, tensors):
        assert threading.current_thread() is threading.main_thread()
        assert all(p.is_meta for p in model.parameters())
        for name, tensor in tensors.items():
            assert torch.equal(tensor, values[name]), name
        seen.append((layer, sorted(tensors)))

    streamload.load_into(model, path, on_layer=on_layer, workers=workers, chunk_bytes=64)
    names = ["fc.bias", "fc.weight", "norm.bias", "norm.weight"]
    assert seen == [
        *((layer, [f"h.{layer}.{name}" for name in names]) for layer in range(BLOCKS)),
        (None, ["embed.weight"]),
    ]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values.get(name, values["embed.weight"])), name
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("options", [{"mode": "map"}, {"dtype": "bfloat16"}, {"layers": [2, 10]}])
def test_with_other_options(path, values, options):
    seen = []

    def on_layer(layer, tensors):
        dtype = torch.bfloat16 if "dtype" in options else torch.float32
        assert {t.dtype for t in tensors.values()} == {dtype}
        seen.append(layer)

    model = empty_model()
    strict = "layers" not in options
    streamload.load_into(model, path, on_layer=on_layer, strict=strict, **options)
    assert seen == [*options.get("layers", range(BLOCKS)), None]


class Doubled(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.twice = nn.Parameter(weight * 2)


def test_tensors_and_modules_are_replaced(path, values):
    gone = []

    def on_layer(layer, tensors):
        if layer is None:
            return {"head.weight": tensors["embed.weight"] + 1}
        if layer % 2:
            gone.append(weakref.ref(tensors[f"h.{layer}.fc.weight"]))
            return {f"h.{layer}.fc": Doubled(tensors[f"h.{layer}.fc.weight"])}
        return {f"h.{layer}.fc.weight": tensors[f"h.{layer}.fc.weight"].neg()}

    model = empty_model()
    model.h[0].fc.weight.requires_grad_(False)
    streamload.load_into(model, path, on_layer=on_layer)
    assert torch.equal(model.h[3].fc.twice, values["h.3.fc.weight"] * 2)
    assert isinstance(model.h[2].fc.weight, nn.Parameter)
    assert not model.h[0].fc.weight.requires_grad
    assert torch.equal(model.h[2].fc.weight, -values["h.2.fc.weight"])
    assert torch.equal(model.h[2].fc.bias, values["h.2.fc.bias"])
    assert torch.equal(model.embed.weight, values["embed.weight"] + 1)
    assert model.head.weight is model.embed.weight
    assert not any(p.is_meta for p in model.parameters())
    gc.collect()
    assert not any(ref() is not None for ref in gone)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("at", [0, 7, None])
@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["error", "^C"])
def test_an_exception_leaves_the_module_as_it_was(path, workers, at, error):
    def on_layer(layer, tensors):
        if layer == at:
            raise error
        return {} if layer is None else {f"h.{layer}.fc": nn.Identity()}

    model = empty_model()
    before = dict(model.named_modules())
    with pytest.raises(type(error)):
        streamload.load_into(model, path, on_layer=on_layer, workers=workers, chunk_bytes=64)
    assert is_untouched(model)
    assert dict(model.named_modules()) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("streamload-")]


def test_a_failing_commit_swaps_modules_back(path):
    model = empty_model()
    before = dict(model.named_modules())

    def on_assign(stored, name):
        if name == "h.9.norm.weight":
            raise RuntimeError("no")

    def on_layer(layer, tensors):
        return None if layer is None else {f"h.{layer}.fc": nn.Identity()}

    with pytest.raises(RuntimeError):
        streamload.load_into(model, path, on_layer=on_layer, on_assign=on_assign)
    assert is_untouched(model)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"h.5.fc.weight": torch.ones(1)}, r"'h.5.fc.weight': Tensor"),
        ({"h.0.fc.weight": nn.Identity()}, r"'h.0.fc.weight': Identity"),
        ({"h.0.fc.weight": None}, r"'h.0.fc.weight': NoneType"),
        ({"nothing": nn.Identity()}, r"'nothing', which the model has not"),
        ({"": nn.Identity()}, r"'', which the model has not"),
        ([1], r"must return None or a dict of replacements, not list"),
        ([], r"must return None or a dict of replacements, not list"),
        ({"h.0.fc.weight": torch.ones(8, 4)}, r"'h.0.fc.weight' of shape \[8, 4\].*\[8, 8\]"),
        ({"h.0.fc.bias": torch.ones(8, 1)}, r"'h.0.fc.bias' of shape \[8, 1\]"),
        ({"h.0.fc.weight": torch.ones(8, 8).half()}, r"'h.0.fc.weight' of .*torch.float16, exp"),
        ({"h.0.fc.weight": torch.ones(8, 8, dtype=torch.int8)}, r"'h.0.fc.weight' of .*int8, exp"),
        (
            {"h.0.fc.bias": torch.ones(8, device="meta")},
            r"'h.0.fc.bias' on device meta, expected c",
        ),
        (
            {"h.0.fc": nn.Linear(8, 8, device="meta")},
            r"'h.0.fc.weight' on device meta, expected cpu",
        ),
        ({"h.0": nn.BatchNorm1d(8, device="meta")}, r"'h.0.running_mean' on device meta, expected"),
        (
            {"h.0.fc.weight": torch.ones(8, 4), "h.0.fc.bias": torch.ones(1), "no": nn.Identity()},
            r"'h.0.fc.bias' of shape \[1\].*'h.0.fc.weight' of shape \[8, 4\]",
        ),
    ],
)
def test_what_has_no_place_is_refused(path, returned, message):
    model = empty_model()
    with pytest.raises(streamload.StreamloadError, match=message):
        streamload.load_into(model, path, on_layer=lambda n, t: returned if n == 0 else None)
    assert is_untouched(model)


def test_tensors_that_are_changed_without_a_word_are_checked_too(path):
    def on_layer(layer, tensors):
        if layer == 3:
            tensors["h.3.fc.bias"].data = torch.ones(8).half()

    model = empty_model()
    with pytest.raises(streamload.StreamloadError, match=r"'h\.3\.fc\.bias' of .*torch.float16"):
        streamload.load_into(model, path, on_layer=on_layer)
    assert is_untouched(model)


def test_one_tied_tensor_cannot_become_two(path):
    def on_layer(layer, tensors):
        names = ("embed.weight", "head.weight")
        return {name: torch.zeros(5, 8) for name in names} if layer is None else None

    model = empty_model()
    with pytest.raises(streamload.StreamloadError, match=r"two tensors for .*, which are one"):
        streamload.load_into(model, path, on_layer=on_layer)
    assert is_untouched(model)


def test_refused_where_tensors_are_overwritten_in_place(path):
    model = Model()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(streamload.PlanError, match=r"on_layer cannot be honoured.*empty_weights"):
        streamload.load_into(model, path, on_layer=lambda layer, tensors: None)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_state_dicts_have_the_replacements_too(path, values):
    made = streamload.load_state_dict(
        path, on_layer=lambda n, t: None if n is None else {f"h.{n}.fc.bias": torch.ones(8)}
    )
    assert torch.equal(made["h.4.fc.bias"], torch.ones(8))
    assert torch.equal(made["h.4.fc.weight"], values["h.4.fc.weight"])
    with pytest.raises(streamload.PlanError, match="no module"):
        streamload.load_state_dict(path, on_layer=lambda n, t: {"h.0": nn.Identity()})


def test_workers_wait_for_a_slow_function(path, monkeypatch):
    from streamload.engine.lanes.cpu import CpuLane, PagedCpuLane

    held, most = set(), []

    def allocate(self, tensor):
        held.add(tensor.layer)
        return CpuLane.allocate(self, tensor)

    monkeypatch.setattr(PagedCpuLane, "allocate", allocate)

    def on_layer(layer, tensors):
        most.append(len(held))
        held.discard(layer)

    streamload.load_into(empty_model(), path, on_layer=on_layer, workers=4, chunk_bytes=64)
    assert len(most) == BLOCKS + 1
    assert max(most) <= AHEAD


def test_on_a_device_each_block_is_there_when_it_is_handed_out(path, values, monkeypatch):
    from streamload.engine.lanes.device import DeviceLane
    from streamload.loading import running as loading

    for seed in range(10):
        ops = FakeOps(seed)
        lane = DeviceLane(ops, slots=1, slot_bytes=64)
        monkeypatch.setattr(loading, "lane_for", lambda *a, lane=lane, **k: lane)

        def on_layer(layer, tensors, ops=ops):
            ops.synchronize(ops.record(ops.current()))
            for name, tensor in tensors.items():
                assert torch.equal(tensor, values[name].bfloat16()), name

        model = empty_model()
        streamload.load_into(model, path, on_layer=on_layer, workers=4, dtype="bfloat16")
        assert torch.equal(model.h[4].fc.weight, values["h.4.fc.weight"].bfloat16())
