"""Every call takes adapters, of every base: what comes out is what PEFT's merge is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import streamload
import streamload.decoding.low_rank
from streamload.cli import main
from tests.adapters.judge import (
    empty_base,
    hand_made,
    is_rounded,
    merged,
    off,
    pair,
    product,
    write_adapter,
    write_base,
)

LINEAR = ["q_proj", "v_proj", "o_proj", "down_proj", "lm_head"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "llama", "llama")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "a", base, target_modules=LINEAR)


@pytest.fixture(scope="module")
def other(base, tmp_path_factory) -> Path:
    """DoRA, so that the order counts."""
    options = {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True, "r": 2}
    return write_adapter(tmp_path_factory.mktemp("other") / "b", base, seed=5, **options)


@pytest.fixture(scope="module")
def wanted(base, adapter):
    return merged(base, adapter)


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.tensor([[1, 5, 3, 9]])
    with torch.no_grad():
        out: Any = model(ids)
    return out if isinstance(out, torch.Tensor) else out.logits


def their_logits(weights) -> torch.Tensor:
    model = empty_base("llama").eval()
    model.load_state_dict(weights)
    return logits(model)


def test_load(base, adapter, wanted):
    loaded = streamload.load(base, adapter=[adapter])
    torch.testing.assert_close(logits(loaded.model), their_logits(wanted), rtol=1e-5, atol=1e-5)
    ways = {entry.name: entry.transform for entry in loaded.report.loaded}
    assert any("lora(rank=4, scale=2)" in way for way in ways.values())
    told = f"adapter {adapter} merged: 1 tensor replaced, 13 tensors lora(rank=4, scale=2)"
    assert told in loaded.report.notices


@pytest.mark.parametrize("mode", ["stream", "map"])
def test_load_into(base, adapter, wanted, mode):
    with streamload.empty_weights():
        module = empty_base("llama")
    report = streamload.load_into(module, base, adapter=adapter, mode=mode)
    assert off(module.state_dict(), wanted) <= 2e-6
    assert report.ok
    filled = empty_base("llama")
    streamload.load_into(filled, base, adapter=adapter)
    assert off(filled.state_dict(), wanted) <= 2e-6


def test_chosen_layers_of_a_base(base, adapter, wanted):
    found = streamload.load_state_dict(base, adapter=adapter, layers=[1], mapping=lambda n: n)
    inside = {name: value for name, value in wanted.items() if ".layers.1." in name}
    assert off({name: found[name] for name in inside}, inside) <= 2e-6
    assert not any(".layers.0." in name for name in found)
    loaded = streamload.load(base, adapter=adapter, layers=[0, 2])
    assert len(loaded.model.blocks) == 2  # type: ignore[arg-type]


def test_a_prefix_of_a_base(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"language_model.model.q.weight": torch.zeros(6, 4)}, path)
    adapter = hand_made(tmp_path / "a", pair("model.q", 6, 4))
    found = streamload.load_state_dict(path, adapter=adapter, prefix="language_model")
    exact = 2 * product(pair("model.q", 6, 4), "model.q")
    assert float((found["model.q.weight"] - exact).abs().max()) < 2e-6


def test_load_state_dict(base, adapter, wanted):
    found = streamload.load_state_dict(base, adapter=adapter, mapping=lambda name: name)
    assert off(found, wanted) <= 2e-6


def test_a_plan_says_it(base, adapter):
    with streamload.empty_weights():
        module = empty_base("llama")
    plan = streamload.plan(module, base, adapter=adapter)
    assert plan.ok
    ways = [entry.transform for entry in plan.report.loaded if entry.transform]
    assert sorted(ways) == ["lora(rank=4, scale=2)"] * 12 + ["replaced+lora(rank=4, scale=2)"]
    plain = streamload.plan(module, base)
    assert plan.memory.staging_bytes > plain.memory.staging_bytes


@pytest.mark.parametrize("names", ["published", "local"])
def test_convert(base, adapter, wanted, names, tmp_path):
    report = streamload.convert(base, tmp_path / "new", adapter=adapter, names=names)
    assert any(f"adapter {adapter} merged" in notice for notice in report.notices)
    loaded = streamload.load(tmp_path / "new")
    torch.testing.assert_close(logits(loaded.model), their_logits(wanted), rtol=1e-5, atol=1e-5)
    if names == "published":
        assert off(load_file(tmp_path / "new" / "model.safetensors"), wanted) <= 2e-6
        assert not list((tmp_path / "new").glob("adapter*"))


def test_conv1d_is_turned_after_it_was_merged(tmp_path):
    base = write_base(tmp_path / "base", "gpt2")
    options = {"target_modules": ["c_attn", "c_proj", "wte"], "use_dora": True}
    adapter = write_adapter(tmp_path / "a", base, **options)
    wanted = merged(base, adapter)
    streamload.convert(base, tmp_path / "new", adapter=adapter)
    found = load_file(tmp_path / "new" / "model.safetensors")
    there = {f"transformer.{name.removeprefix('transformer.')}": t for name, t in found.items()}
    assert off(there, {name: wanted[name] for name in there}) <= 2e-6
    model = empty_base("gpt2").eval()
    model.load_state_dict(wanted)
    for loaded in (
        streamload.load(base, adapter=adapter),
        streamload.load(base, adapter=adapter, mode="stream", layout="stored", chunk_bytes=64),
        streamload.load(tmp_path / "new"),
    ):
        torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-5, atol=1e-5)


def test_commands(base, adapter, other, wanted, tmp_path):
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(main, [str(a) for a in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    new = tmp_path / "new"
    run("convert", base, new, "--adapter", adapter)
    assert off(load_file(new / "model.safetensors"), wanted) <= 2e-6
    plan = json.loads(run("plan", base, "--adapter", adapter, "--adapter", other, "--json"))
    assert sum("merged" in notice for notice in plan["notices"]) == 2
    ask = ("--tokens", "1,2,3", "--max-new-tokens", "5", "--json")
    told = json.loads(run("generate", base, "--adapter", adapter, *ask))
    assert told["tokens"] == json.loads(run("generate", new, *ask))["tokens"]


def test_two_adapters_in_order(base, adapter, other):
    for first, second in ((adapter, other), (other, adapter)):
        found = streamload.load_state_dict(base, adapter=(first, second), mapping=lambda n: n)
        assert off(found, merged(base, first, second)) <= 2e-6
    again = streamload.load_state_dict(base, adapter=[adapter, adapter], mapping=lambda n: n)
    assert off(again, merged(base, adapter, adapter)) <= 2e-6


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickled_adapter(base, adapter, wanted, legacy, tmp_path):
    shutil.copytree(adapter, tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors = {n: t.t().contiguous().t() if "q_proj" in n else t for n, t in tensors.items()}
    save = {"_use_new_zipfile_serialization": not legacy}
    torch.save(tensors, tmp_path / "a" / "adapter_model.bin", **save)
    for path in (tmp_path / "a", tmp_path / "a" / "adapter_model.bin"):
        found = streamload.load_state_dict(base, adapter=path, mapping=lambda n: n)
        assert off(found, wanted) <= 2e-6


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickled_base_with_transposed_weights(base, adapter, other, legacy, tmp_path):
    tensors = load_file(base / "model.safetensors")
    turned = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in tensors.items()}
    save = {"_use_new_zipfile_serialization": not legacy}
    torch.save(turned, tmp_path / "model.bin", **save)
    found = streamload.load_state_dict(
        tmp_path / "model.bin", adapter=[adapter, other], mapping=lambda n: n
    )
    assert off(found, merged(base, adapter, other)) <= 2e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_bases_of_other_dtypes(base, adapter, dtype, tmp_path):
    kind = getattr(torch, dtype)
    tensors = {n: t.to(kind) for n, t in load_file(base / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(base / "config.json", tmp_path)
    exact = dict(tensors)
    stored = load_file(adapter / "adapter_model.safetensors")
    for name in tensors:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        exact[name] = stored.get(f"{module}.base_layer.weight", tensors[name]).double()
        if f"{module}.lora_A.weight" in stored:
            exact[name] = exact[name] + 2 * product(stored, module)
    found = streamload.load_state_dict(tmp_path, adapter=adapter, mapping=lambda n: n)
    for name, value in found.items():
        assert value.dtype == kind
        assert is_rounded(value, exact[name], 1e-12 if dtype == "float64" else 1e-6), name


def test_a_base_in_fp8(base, tmp_path):
    tensors = load_file(base / "model.safetensors")
    weight = torch.randn(16, 16)
    scale = torch.tensor([[0.5]])
    name = "model.layers.0.self_attn.q_proj"
    stored = weight.to(torch.float8_e4m3fn)
    save_file(
        tensors | {f"{name}.weight": stored, f"{name}.weight_scale_inv": scale},
        tmp_path / "model.safetensors",
    )
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    factors = pair(name, 16, 16)
    adapter = hand_made(tmp_path / "a", factors)
    exact = stored.double() * 0.5 + 2 * product(factors, name)
    found = streamload.load_state_dict(
        tmp_path, adapter=adapter, dtype="float32", mapping=lambda n: n
    )
    assert float((found[f"{name}.weight"] - exact).abs().max()) < 2e-6
    report = streamload.convert(tmp_path, tmp_path / "new", adapter=adapter, dtype="float32")
    way = next(t.transform for t in report.written if t.name == f"{name}.weight")
    assert way.startswith("fp8")
    assert way.endswith("+lora(rank=2, scale=2)")


@pytest.mark.parametrize("shapes", ["in one", "apart"])
def test_blocks_of_any_size_and_threads_are_the_same(base, adapter, other, shapes, monkeypatch):
    whole = streamload.load_state_dict(base, adapter=[adapter, other], dtype="bfloat16")
    monkeypatch.setattr(streamload.decoding.low_rank, "_AT_ONCE", 1)
    monkeypatch.setattr(streamload.decoding.low_rank, "_KEPT", 0 if shapes == "apart" else 1 << 20)
    parts = streamload.load_state_dict(
        base, adapter=[adapter, other], dtype="bfloat16", chunk_bytes=256, workers=4
    )
    assert all(is_rounded(parts[n], whole[n].double(), 1e-2) for n in whole)
    one = streamload.load_state_dict(base, adapter=[adapter, other], chunk_bytes=256)
    assert off(one, streamload.load_state_dict(base, adapter=[adapter, other])) < 2e-6


def test_float32_products_are_exact_whatever_the_program_allows(base, adapter, wanted):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = streamload.load_state_dict(base, adapter=adapter, mapping=lambda n: n)
    finally:
        torch.set_float32_matmul_precision(before)
    assert off(found, wanted) <= 2e-6


def test_convolutions(tmp_path):
    base = {"conv.weight": torch.randn(6, 4, 3, 3), "line.weight": torch.randn(6, 4, 3)}
    save_file(base, tmp_path / "model.safetensors")
    factors = {
        "conv.lora_A.weight": torch.randn(2, 4, 3, 3),
        "conv.lora_B.weight": torch.randn(6, 2, 1, 1),
        "line.lora_A.weight": torch.randn(2, 4, 3),
        "line.lora_B.weight": torch.randn(6, 2, 1),
    }
    adapter = hand_made(tmp_path / "a", factors)
    found = streamload.load_state_dict(tmp_path / "model.safetensors", adapter=adapter)
    for name, value in found.items():
        lead = name.removesuffix(".weight")
        a, b = (factors[f"{lead}.lora_{letter}.weight"].double().flatten(1) for letter in "AB")
        exact = base[name].double() + 2 * (b @ a).view(base[name].shape)
        assert float((value - exact).abs().max()) < 2e-6


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_stack_of_experts_in_one_tensor(is_turned, tmp_path):
    experts, outputs, inputs, rank = 3, 6, 4, 2
    shape = (experts, inputs, outputs) if is_turned else (experts, outputs, inputs)
    weight = torch.randn(shape)
    save_file({"model.layers.0.mlp.experts.down_proj": weight}, tmp_path / "model.safetensors")
    kind = "gpt_oss" if is_turned else "llama4_moe"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    module = "model.layers.0.mlp.experts"
    factors = pair(module, outputs, inputs, rank * experts)
    adapter = hand_made(tmp_path / "a", factors, target_parameters=["mlp.experts.down_proj"])
    found = streamload.load_state_dict(tmp_path, adapter=adapter, mapping=lambda n: n)
    a = factors[f"{module}.lora_A.weight"].double().view(experts, rank, inputs)
    b = factors[f"{module}.lora_B.weight"].double().view(outputs, rank, experts)
    delta = torch.einsum("ore,eri->eio" if is_turned else "ore,eri->eoi", b, a)
    exact = weight.double() + 2 * delta
    assert float((found[f"{module}.down_proj"] - exact).abs().max()) < 2e-6


@pytest.mark.parametrize(
    ("stored", "module"),
    [
        ("model.layers.0.q.weight", "model.layers.0.q"),
        ("layers.0.q.weight", "model.layers.0.q"),
        ("model.layers.0.q.weight", "layers.0.q"),
        ("_orig_mod.model.layers.0.q.weight", "model.layers.0.q"),
        ("language_model.model.layers.0.q.weight", "model.language_model.layers.0.q"),
        ("backbone.layers.0.q.weight", "layers.0.q"),
        ("layers.0.q.weight", "backbone.layers.0.q"),
        ("m.0.block_sparse_moe.experts.1.w2.weight", "m.0.mlp.experts.1.w2"),
    ],
)
def test_names_with_and_without_wrappers(stored, module, tmp_path):
    save_file({stored: torch.zeros(6, 4)}, tmp_path / "model.safetensors")
    factors = pair(module, 6, 4)
    adapter = hand_made(tmp_path / "a", factors)
    found = streamload.load_state_dict(tmp_path / "model.safetensors", adapter=adapter)
    assert float((found[stored] - 2 * product(factors, module)).abs().max()) < 2e-6


def test_a_head_of_another_task_is_added(base, tmp_path):
    head = torch.randn(3, 16)
    factors = pair("model.layers.0.self_attn.q_proj", 16, 16)
    adapter = hand_made(
        tmp_path / "a", {**factors, "score.weight": head}, modules_to_save=["score"]
    )
    found = streamload.load_state_dict(base, adapter=adapter, mapping=lambda n: n)
    assert torch.equal(found["score.weight"], head)


def test_what_is_tied_to_the_embedding_is_told(tmp_path):
    base = write_base(tmp_path / "base", "tied llama")
    adapter = hand_made(
        tmp_path / "a",
        {
            "model.embed_tokens.lora_embedding_A": torch.randn(2, 40),
            "model.embed_tokens.lora_embedding_B": torch.randn(16, 2),
        },
    )
    notices = streamload.load(base, adapter=adapter).report.notices
    assert any("also the output layer" in notice for notice in notices)


def test_the_cache_knows_adapters(base, adapter, other, wanted, tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def loaded(**options: Any):
        return streamload.load_state_dict(base, cache=True, mapping=lambda n: n, **options)

    mine = tmp_path / "a"
    shutil.copytree(adapter, mine)
    assert off(loaded(adapter=mine), wanted) <= 2e-6
    assert off(loaded(adapter=mine), wanted) <= 2e-6  # from the copy
    assert off(loaded(), dict(empty_like(base))) == 0
    orders = [loaded(adapter=order) for order in ([mine, other], [other, mine])]
    assert off(orders[0], orders[1]) > 1e-3
    config = json.loads((mine / "adapter_config.json").read_text())
    (mine / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 0}))
    assert off(loaded(adapter=mine), loaded()) == 0


def empty_like(base: Path) -> dict[str, torch.Tensor]:
    return load_file(base / "model.safetensors")
