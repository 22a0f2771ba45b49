"""Experts apart in a file and stacked in a module, and the other way, through the public calls."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import streamload
from streamload import Chain, Concat, NameMap, Rule, Split, Stack, Transpose, Unstack
from tests.support.tiny import bag, holds, refused, same_bits, state_of, values

LAYERS, EXPERTS, WIDTH, INNER = (
    2,
    11,
    6,
    5,
)  # more than ten: names in the file's order are not theirs
EXPERT = "model.layers.{layer}.mlp.experts.{expert}."
CUT = Concat(0, (INNER, INNER))
TABLE = NameMap(
    (
        Rule((EXPERT + "gate", EXPERT + "up"), "layers.{layer}.gate_up", Chain(CUT, Stack(0))),
        Rule(EXPERT + "down", "layers.{layer}.down", Chain(Transpose(), Stack(0))),
    ),
    layers=LAYERS,
)
# The same file into stacks, and a stacked file into experts apart.
BACK = NameMap(
    (
        Rule(
            "layers.{layer}.gate_up", (EXPERT + "gate", EXPERT + "up"), Chain(Unstack(0), Split(0))
        ),
        Rule("layers.{layer}.down", EXPERT + "down", Chain(Transpose(1, 2), Unstack(0))),
    ),
    layers=LAYERS,
)


def apart() -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{i}.mlp.experts.{e}.{name}": values(i * 1000 + e * 10 + at, *shape)
        for i in range(LAYERS)
        for e in range(EXPERTS)
        for at, (name, shape) in enumerate(
            (("gate", (INNER, WIDTH)), ("up", (INNER, WIDTH)), ("down", (WIDTH, INNER)))
        )
    }


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def of(i, name):
        return [tensors[f"model.layers.{i}.mlp.experts.{e}.{name}"] for e in range(EXPERTS)]

    made = {}
    for i in range(LAYERS):
        pairs = zip(of(i, "gate"), of(i, "up"), strict=True)
        made[f"layers.{i}.gate_up"] = torch.stack([torch.cat(pair) for pair in pairs])
        made[f"layers.{i}.down"] = torch.stack([w.t() for w in of(i, "down")]).contiguous()
    return made


@pytest.fixture
def path(tmp_path):
    save_file(apart(), tmp_path / "apart.safetensors")
    return tmp_path / "apart.safetensors"


def empty(**options):
    return bag({n: tuple(t.shape) for n, t in stacked(apart()).items()}, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "map"},
        {"layout": "stored"},
        {"workers": 3, "chunk_bytes": 64},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "layout": "stored", "chunk_bytes": 32},
    ],
)
def test_every_way_of_loading_gives_torchs_stack(path, options):
    model = empty()
    report = streamload.load_into(model, path, mapping=TABLE, **options)
    dtype = getattr(torch, options.get("dtype", "float32"))
    assert holds(model, {n: t.to(dtype) for n, t in stacked(apart()).items()})
    assert report.summary() == "loaded=4 missing=0 unexpected=0 shape_mismatch=0"
    assert "experts.0.gate + " in report.to_text(verbose=True)
    assert len(report.to_text(verbose=True)) < 2000, "dozens of names are not written out"
    found = streamload.load_state_dict(path, mapping=TABLE, **options)
    assert all(same_bits(found[n].contiguous(), t.to(dtype)) for n, t in stacked(apart()).items())


def test_into_stacks_that_hold_data(path):
    model = empty(device="cpu", dtype=torch.bfloat16)
    held = {n: p.data_ptr() for n, p in model.named_parameters()}
    streamload.load_into(model, path, mapping=TABLE)
    assert holds(model, {n: t.bfloat16() for n, t in stacked(apart()).items()})
    assert held == {n: p.data_ptr() for n, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"mode": "map"}, {"dtype": "bfloat16", "chunk_bytes": 40}])
def test_a_stacked_file_into_experts_apart(tmp_path, options):
    save_file(stacked(apart()), tmp_path / "stacked.safetensors")
    model = bag({n: tuple(t.shape) for n, t in apart().items()})
    streamload.load_into(model, tmp_path / "stacked.safetensors", mapping=BACK, **options)
    dtype = getattr(torch, options.get("dtype", "float32"))
    for name, tensor in apart().items():
        assert same_bits(model.get_parameter(name).contiguous(), tensor.to(dtype))


def test_experts_of_a_stack_are_views_of_a_mapped_file(tmp_path):
    whole = {"layers.0.down": values(1, EXPERTS, WIDTH, INNER)}
    save_file(whole, tmp_path / "x.safetensors")
    rule = Rule("layers.{layer}.down", "{layer}.{expert}.w", Unstack(0))
    model = bag({f"0.{e}.w": (WIDTH, INNER) for e in range(EXPERTS)})
    report = streamload.load_into(
        model, tmp_path / "x.safetensors", mapping=NameMap((rule,)), mode="map"
    )
    assert report.bytes_read == 0
    assert holds(model, {f"0.{e}.w": whole["layers.0.down"][e] for e in range(EXPERTS)})


def test_a_block_is_given_out_once_its_stacks_are_whole(path):
    seen = {}
    streamload.load_into(
        empty(), path, mapping=TABLE, on_layer=lambda i, t: seen.update({i: set(t)}) or None
    )
    assert seen == {i: {f"layers.{i}.gate_up", f"layers.{i}.down"} for i in range(LAYERS)}


def test_some_layers(path):
    model = empty()
    streamload.load_into(model, path, mapping=TABLE, layers=[1])
    assert model.get_parameter("layers.0.down").is_meta
    assert same_bits(model.get_parameter("layers.1.down"), stacked(apart())["layers.1.down"])


def test_values_that_overflow_are_counted_for_the_stack(tmp_path):
    tensors = apart()
    for e in (2, 7):
        tensors[f"model.layers.1.mlp.experts.{e}.down"][0, 0] = 1e6
    save_file(tensors, tmp_path / "x.safetensors")
    report = streamload.load_into(
        empty(), tmp_path / "x.safetensors", mapping=TABLE, dtype="float16"
    )
    (notice,) = report.notices
    assert "'layers.1.down'" in notice
    assert "2 " in notice
    model = empty()
    with refused(tmp_path / "x.safetensors", model, streamload.StreamloadError):
        streamload.load_into(
            model,
            tmp_path / "x.safetensors",
            mapping=TABLE,
            dtype="float16",
            overflow="refuse",
        )


@pytest.mark.parametrize("strict", [True, False])
def test_a_module_is_never_left_with_half_a_stack(tmp_path, strict):
    tensors = apart()
    del tensors["model.layers.1.mlp.experts.4.up"]
    save_file(tensors, tmp_path / "x.safetensors")
    model = empty(device="cpu")
    before = state_of(model)["values"]["layers.1.gate_up"]
    if strict:
        with refused(tmp_path / "x.safetensors", model) as caught:
            streamload.load_into(model, tmp_path / "x.safetensors", mapping=TABLE)
        assert "'model.layers.1.mlp.experts.4.up' is missing" in str(caught[0])
        return
    report = streamload.load_into(model, tmp_path / "x.safetensors", mapping=TABLE, strict=False)
    assert report.missing == ("layers.1.gate_up",)
    assert any("'model.layers.1.mlp.experts.4.up' is missing" in n for n in report.notices)
    assert same_bits(model.get_parameter("layers.1.gate_up"), before)
    assert same_bits(
        model.get_parameter("layers.1.down"), stacked(tensors | apart())["layers.1.down"]
    )


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_there_and_back(path, tmp_path, dtype):
    model = empty()
    streamload.load_into(model, path, mapping=TABLE)
    streamload.export(model, tmp_path / "again.safetensors", mapping=TABLE, dtype=dtype)
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == apart().keys()
    kind = torch.bfloat16 if dtype else torch.float32
    assert all(same_bits(again[n], t.to(kind)) for n, t in apart().items())


def test_back_and_there(tmp_path):
    save_file(stacked(apart()), tmp_path / "stacked.safetensors")
    model = bag({n: tuple(t.shape) for n, t in apart().items()})
    streamload.load_into(model, tmp_path / "stacked.safetensors", mapping=BACK)
    streamload.export(model, tmp_path / "again.safetensors", mapping=BACK)
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == stacked(apart()).keys()
    assert all(same_bits(again[n], t) for n, t in stacked(apart()).items())


MIB = 1 << 20
_MEASURE = """
import sys, torch, streamload
from streamload import Chain, Concat, NameMap, Rule, Stack, Transpose
small, path, turned = sys.argv[1], sys.argv[2], sys.argv[3] == "turned"
def rules(shape):
    each = (Transpose(),) if turned else ()
    table = NameMap((
        Rule(("e.{expert}.gate", "e.{expert}.up"), "gate_up", Chain(*each, Concat(0), Stack(0))),
    ))
    module = torch.nn.Module()
    module.gate_up = torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
    return module, table
for where, shape in ((small, (4, 4, 2)), (path, (16, 2048, 1024))):
    module, table = rules(shape)
    report = streamload.load_into(module, where, mapping=table, dtype="bfloat16")
assert all(bool((module.gate_up[e] == e + 1).all()) for e in range(16))
print(report.memory.peak_rss_bytes)
"""


@pytest.mark.parametrize("way", ["straight", "turned"])
def test_a_stack_of_experts_is_never_copied(tmp_path, way):
    """64 MiB in bfloat16, from twice that; measured in a process of its own."""

    def save(name, experts, rows, columns):
        shape = (columns, rows) if way == "turned" else (rows, columns)
        names = [(e, p) for e in range(experts) for p in ("gate", "up")]
        tensors = {f"e.{e}.{p}": torch.full(shape, float(e + 1)) for e, p in names}
        save_file(tensors, tmp_path / name)
        return str(tmp_path / name)

    small, big = save("small", 4, 2, 2), save("big.safetensors", 16, 1024, 1024)
    command = [sys.executable, "-c", _MEASURE, small, big, way]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (64 + 32) * MIB
