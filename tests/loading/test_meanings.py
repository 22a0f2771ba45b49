"""Files and names that change what the weights mean are told first, in a refusal or a notice."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import streamload

CONFIG = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "architectures": ["LlamaForCausalLM"],
}
LORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
ADAPTER = {LORA.format("A"): torch.ones(2, 8), LORA.format("B"): torch.ones(8, 2)}
ADAPTER_CONFIG = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    from streamload.mapping.tables.registry import build_model

    path = tmp_path_factory.mktemp("base") / "model.safetensors"
    streamload.export(build_model("llama", CONFIG), path)
    return load_file(path)


def folder(path, tensors, config=CONFIG, **files):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    for name, value in (files | {"config": config}).items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def first_words(call, *arguments, **options):
    """The refusal after the path."""
    with pytest.raises(streamload.PlanError) as info:
        call(*arguments, **options)
    return str(info.value).partition(": ")[2]


def test_an_adapter_alone(tmp_path):
    alone = tmp_path / "adapter"
    alone.mkdir()
    save_file(ADAPTER, alone / "adapter_model.safetensors")
    (alone / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))
    for call in (streamload.load, streamload.open_checkpoint, streamload.load_state_dict):
        with pytest.raises(streamload.CheckpointNotFoundError, match=r"LORA.*base model.*org/base"):
            call(alone)
    module = nn.Linear(8, 8)
    for strict in (True, False):
        said = first_words(
            streamload.load_into, module, alone / "adapter_model.safetensors", strict=strict
        )
        assert said.startswith("this is, or holds, a PEFT adapter (LORA of the base model 'org/")


def test_an_adapter_beside_its_base_is_told(tmp_path, tensors):
    both = folder(tmp_path / "both", tensors, adapter_config=ADAPTER_CONFIG)
    save_file(ADAPTER, both / "adapter_model.safetensors")
    notice = streamload.load(both).report.notices[0]
    assert notice.startswith("adapter_config.json beside the weights")
    assert "not applied" in notice
    with pytest.warns(UserWarning, match="not applied"):
        streamload.load_state_dict(both)
    (both / "adapter_config.json").write_text("{")
    assert "not applied" in streamload.load(both).report.notices[0]


@pytest.mark.parametrize("strict", [True, False])
def test_adapters_that_are_not_merged_are_refused(tmp_path, tensors, strict):
    wrapped = {f"base_model.model.{name}": value for name, value in tensors.items()}
    path = folder(tmp_path / "wrapped", wrapped | ADAPTER)
    said = first_words(streamload.load, path, strict=strict)
    assert said.startswith("this is, or holds, a PEFT adapter")
    assert "lora_A" in said


def test_a_module_that_is_wrapped(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"q.weight": torch.ones(2, 2)}, path)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(2, 2, bias=False)
            self.lora_A = nn.Linear(2, 1, bias=False)

    module = nn.ModuleDict({"q": Wrapped()})
    said = first_words(streamload.load_into, module, path)
    assert said.startswith("the module is wrapped by PEFT")
    save_file(module.state_dict(), path)
    assert not streamload.load_into(module, path).notices


QUANTISED = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize("strict", [True, False])
def test_quantised_weights_are_told_first(tmp_path, tensors, strict):
    name = "model.layers.0.mlp.up_proj.weight"
    odd = {n: t for n, t in tensors.items() if n != name}
    odd[name.replace("weight", "qweight")] = torch.zeros(1, 16, dtype=torch.int32)
    path = folder(tmp_path / "q", odd, CONFIG | {"quantization_config": QUANTISED})
    start = "the weights are quantised: config.json has quantization_config (gptq)"
    assert first_words(streamload.load, path, strict=strict).startswith(start)
    plan = streamload.plan(nn.Linear(1, 1), path, strict=strict)
    assert plan.problems[0].startswith(start)


def test_int8_numbers_without_scales_are_told(tmp_path, tensors):
    path = folder(
        tmp_path / "q",
        {n: t.to(torch.int8) if t.dim() == 2 else t for n, t in tensors.items()},
        CONFIG | {"quantization_config": {"quant_method": "x"}},
    )
    for strict in (True, False):
        assert first_words(streamload.load, path, strict=strict).startswith("the weights are quan")
    assert streamload.plan(nn.Linear(1, 1), path).problems[0].startswith("the weights are quan")
    assert "(x)" in first_words(streamload.load_state_dict, path)
    assert "(x)" in first_words(streamload.convert, path, tmp_path / "copy")


def test_a_quantised_folder_is_copied_or_refused(tmp_path, tensors):
    config = CONFIG | {"quantization_config": QUANTISED, "torch_dtype": "bfloat16"}
    path = folder(tmp_path / "q", tensors | {"x.qweight": torch.ones(2).int()}, config)
    for options in ({"dtype": "float32"}, {"names": "local"}):
        said = first_words(streamload.convert, path, tmp_path / "no", **options)
        assert "the weights are quantised: config.json has quantization_config" in said
        assert not (tmp_path / "no").exists()
    report = streamload.convert(path, tmp_path / "copy")
    assert "kept as stored" in " ".join(report.notices)
    assert json.loads((tmp_path / "copy/config.json").read_text()) == config
    copied = load_file(tmp_path / "copy/model.safetensors")
    assert copied.keys() == {*tensors, "x.qweight"}
    assert all(torch.equal(copied[name], value) for name, value in tensors.items())


HEADS = {
    "score.weight": "LlamaForSequenceClassification",
    "classifier.weight": "LlamaForTokenClassification",
    "v_head.summary.weight": "LlamaForCausalLM",
    "qa_outputs.weight": "LlamaForQuestionAnswering",
}


@pytest.mark.parametrize("head", HEADS)
def test_a_head_of_another_task_is_told(tmp_path, tensors, head):
    arch = HEADS[head]
    path = folder(
        tmp_path / "m", tensors | {head: torch.ones(1, 8)}, CONFIG | {"architectures": [arch]}
    )
    said = first_words(streamload.load, path)
    if arch != "LlamaForCausalLM":
        assert said.startswith(f"config.json: architectures says {arch}")
    assert f"head ({head!r})" in said or f"reward model ({head!r})" in said or head in said
    report = streamload.load(path, strict=False).report
    assert any(head in notice and "no place" in notice for notice in report.notices)


def test_plain_folders_say_nothing(tmp_path, tensors):
    path = folder(tmp_path / "plain", tensors)
    assert not streamload.load(path).report.notices
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streamload.load_state_dict(path)
        dict(streamload.iter_tensors(path))


SCALES = ["w.weight_scale_inv", "w.weight_scale", "w.scale"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_fp8_with_scales_is_never_passed_on_without_a_warning(tmp_path, scale, dtype):
    path = tmp_path / "w.safetensors"
    save_file({"w.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), scale: torch.ones(1)}, path)
    with pytest.warns(UserWarning, match=f"'w.weight'.*{scale}.*not applied"):
        streamload.load_state_dict(path, dtype=dtype)
    for names in (None, ["w.weight"]):
        with pytest.warns(UserWarning, match=f"'w.weight'.*{scale}.*not applied"):
            dict(streamload.iter_tensors(path, names=names, dtype=dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dict(streamload.iter_tensors(path, names=[scale]))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_no_memory_while_the_model_is_built(tmp_path, tensors, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("streamload.loading.building.build_model", fail)
    path = folder(tmp_path / "m", tensors)
    with pytest.raises(streamload.MemoryBudgetError, match="not enough memory to build") as info:
        streamload.load(path)
    assert info.value.available_bytes > 0
    assert "\n" not in str(info.value)
