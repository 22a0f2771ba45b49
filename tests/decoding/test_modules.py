"""Who takes decoded values and who takes what is stored: modules, transformers, conversions."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import streamload
from tests.decoding.quantised import CASES, Case, eight_bits, floats, spread

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


@pytest.fixture
def case() -> Case:
    return CASES["fp8 ragged"]()


def linear(shape: torch.Size, **options) -> nn.ModuleDict:
    with streamload.empty_weights():
        return nn.ModuleDict({"a": nn.Linear(shape[1], shape[0], bias=False, **options)})


def test_a_module_gets_bfloat16_or_what_is_asked_for(tmp_path, case):
    path, values = case.write(tmp_path / "q"), case.values["a.weight"]
    for dtype in (None, "float32", "float16"):
        module = linear(values.shape)
        report = streamload.load_into(module, path, dtype=dtype)
        found = module["a"].weight
        assert found.dtype == getattr(torch, dtype or "bfloat16")
        assert torch.equal(found, values.float().to(found.dtype))
        assert isinstance(found, nn.Parameter)
        (entry,) = report.loaded
        assert entry.stored_dtype == "float8_e4m3fn"
        assert entry.transform == "fp8 in blocks of 128 x 128"
        assert any("decoded: 1 tensor of fp8 in blocks" in n for n in report.notices)
        read = [case.stored[n].nbytes for n in ("a.weight", "a.weight_scale_inv")]
        assert report.bytes_read == sum(read)


def test_values_are_copied_into_a_module_that_holds_data(tmp_path, case):
    path, values = case.write(tmp_path / "q"), case.values["a.weight"]
    module = nn.ModuleDict({"a": nn.Linear(values.shape[1], values.shape[0], bias=False)})
    held = module["a"].weight.data_ptr()
    streamload.load_into(module, path)
    assert module["a"].weight.data_ptr() == held
    assert torch.equal(module["a"].weight, values.float())


def test_a_transposed_target(tmp_path):
    """gpt-oss's experts, and a table that turns a matrix."""
    case = CASES["fp8 ragged"]()
    path, values = case.write(tmp_path / "q"), case.values["a.weight"]
    module = linear(values.t().shape)
    rule = streamload.Rule("a.weight", "a.weight", streamload.Transpose())
    streamload.load_into(module, path, mapping=streamload.NameMap((rule,)), chunk_bytes=999)
    assert torch.equal(module["a"].weight, values.t().float().bfloat16())


def test_a_module_with_scales_of_its_own_takes_all_as_it_is(tmp_path, case):
    path = case.write(tmp_path / "q")

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(300, 200, dtype=torch.float8_e4m3fn), False)
            self.weight_scale_inv = nn.Parameter(torch.empty(3, 2), False)
            self.input_scale = nn.Parameter(torch.empty(1), False)

    with torch.device("meta"):
        module = nn.ModuleDict({"a": Quantised()})
    report = streamload.load_into(module, path)
    assert report.ok
    assert not report.notices
    for name, stored in case.stored.items():
        found = module.get_parameter(name)
        assert torch.equal(found.view(torch.uint8), stored.view(torch.uint8))


def test_without_a_dtype_what_is_stored_is_kept_and_said(tmp_path, case):
    path = case.write(tmp_path / "q")
    del case.stored["a.input_scale"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = streamload.load_state_dict(path)
    assert re.search(r"quantization_config \(fp8\).*as they are.*dtype=", str(told[0].message))
    assert found.keys() >= case.stored.keys()
    assert found["a.weight"].dtype == torch.float8_e4m3fn
    report = streamload.convert(path, tmp_path / "copy")
    assert any("kept as stored" in notice for notice in report.notices)
    assert "quantization_config" in json.loads((tmp_path / "copy/config.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streamload.load_state_dict(path, dtype="float32")


@pytest.mark.parametrize("kind", ["fp8 ragged", "mxfp4", "gptq", "int4 zeros"])
def test_a_conversion_writes_values_and_a_plain_configuration(tmp_path, kind):
    case = CASES[kind]()
    path = case.write(tmp_path / "q", torch_dtype="float16")
    report = streamload.convert(path, tmp_path / "plain", dtype="bfloat16")
    assert any("decoded" in notice for notice in report.notices)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert config == {"model_type": "none", "dtype": "bfloat16"}
    found = load_file(tmp_path / "plain/model.safetensors")
    assert found.keys() == case.values.keys()
    for name, values in case.values.items():
        assert torch.equal(found[name], values.float().bfloat16())


def test_overflows_are_counted(tmp_path):
    q = torch.full((40, 40), 448.0).to(torch.float8_e4m3fn)
    stored = {"a.weight": q, "a.weight_scale": torch.tensor([1000.0])}
    path = Case(stored, {"quant_method": "fp8"}, {}).write(tmp_path / "q")
    report = streamload.load_into(linear(q.shape), path, dtype="float16")
    assert any("1600 finite values overflow" in notice for notice in report.notices)
    with pytest.raises(streamload.StreamloadError, match="overflow"):
        streamload.load_into(linear(q.shape), path, dtype="float16", overflow="refuse")


def test_nan_and_the_largest_scales(tmp_path):
    q = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    for scale in (1.5, 2.0**120, 2.0**-140):
        stored = {"a.weight": q, "a.weight_scale": torch.tensor(scale)}
        path = Case(stored, {"quant_method": "fp8"}, {}).write(tmp_path / f"{scale}")
        found = streamload.load_state_dict(path, dtype="float32")["a.weight"]
        assert torch.equal(found, (q.double() * scale).float()) or torch.allclose(
            found, (q.double() * scale).float(), rtol=0, atol=0, equal_nan=True
        )


def test_decoded_tensors_are_streamed_and_the_others_mapped(tmp_path):
    case = CASES["fp4 beside fp8"]()
    path = case.write(tmp_path / "q")
    found = streamload.load_state_dict(path, dtype="bfloat16", mode="map")
    for name, values in case.values.items():
        assert torch.equal(found[name], values.float().bfloat16())


def llama(folder: Path, make, config: dict) -> dict[str, torch.Tensor]:
    """A folder whose linear weights are quantised; its values in bfloat16."""
    transformers = pytest.importorskip("transformers")
    plain = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(plain).bfloat16()
    stored, values = {}, {}
    for name, tensor in model.state_dict().items():
        if name.endswith("proj.weight"):
            parts, decoded = make(name, tensor)
            stored |= parts
            values[name] = decoded.float().bfloat16()
        else:
            stored[name] = values[name] = tensor.clone()
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {**plain.to_dict(), "quantization_config": config, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields))
    return values


def in_blocks(name: str, like: torch.Tensor):
    q = eight_bits(torch.float8_e4m3fn, *like.shape)
    scale = floats(like.shape[0] // 16, like.shape[1] // 16)
    return {name: q, f"{name}_scale_inv": scale}, q.double() * spread(scale, 16, 16, like.shape)


class TestTransformers:
    def test_a_plain_class_gets_what_its_own_dequantising_gives(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        values = llama(tmp_path / "q", in_blocks, FP8)
        loaded = streamload.load_transformers(tmp_path / "q")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "q",
            quantization_config=transformers.FineGrainedFP8Config(
                dequantize=True, weight_block_size=(16, 16)
            ),
        )
        assert "quantization_config" not in loaded.config
        ours, expected = loaded.model.state_dict(), theirs.state_dict()
        assert ours.keys() == expected.keys() >= values.keys()
        for name, tensor in expected.items():
            assert ours[name].dtype == tensor.dtype
            assert torch.equal(ours[name], tensor), name
        assert all(torch.equal(ours[name], tensor) for name, tensor in values.items())

    def test_its_own_quantised_layers_take_what_is_stored(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

        llama(tmp_path / "q", in_blocks, FP8)
        config = transformers.AutoConfig.from_pretrained(tmp_path / "q")
        settings = transformers.FineGrainedFP8Config(weight_block_size=(16, 16))
        with torch.device("meta"):
            module = transformers.LlamaForCausalLM(config)
            module = replace_with_fp8_linear(
                module, ["lm_head"], quantization_config=settings, pre_quantized=True
            )
        assert any(isinstance(part, FP8Linear) for part in module.modules())
        with streamload.empty_weights():
            module.model.rotary_emb = type(module.model.rotary_emb)(config)
        report = streamload.load_into(module, tmp_path / "q")
        stored = load_file(tmp_path / "q/model.safetensors")
        assert report.ok
        for name, tensor in stored.items():
            found = module.get_parameter(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name

    def test_its_quantiser_is_not_asked(self, tmp_path):
        llama(tmp_path / "q", in_blocks, FP8)
        with pytest.raises(TypeError, match="quantised already are decoded"):
            streamload.load_transformers(tmp_path / "q", quantization_config=object())

    def test_mxfp4_is_what_its_own_code_makes(self, tmp_path):
        pytest.importorskip("transformers")
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        case = CASES["mxfp4"]()
        path = case.write(tmp_path / "q")
        blocks, scales = case.stored.values()
        found = streamload.load_state_dict(path, dtype="bfloat16")
        expected = convert_moe_packed_tensors(blocks, scales)
        assert torch.equal(found["experts.gate_up_proj"], expected)

    def test_fp4_is_what_its_own_code_makes(self, tmp_path):
        pytest.importorskip("transformers")
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        case = CASES["fp4 beside fp8"]()
        path = case.write(tmp_path / "q")
        found = streamload.load_state_dict(path, dtype="bfloat16")
        for name in ("attn.wq", "experts.0.w1"):
            stored = case.stored[f"{name}.weight"], case.stored[f"{name}.scale"]
            expected = Fp8Dequantize(None)._dequantize_one(*stored, torch.bfloat16)
            assert torch.equal(found[f"{name}.weight"], expected)


def test_the_reference_model_is_loaded(tmp_path):
    values = llama(tmp_path / "q", in_blocks, FP8)
    loaded = streamload.load(tmp_path / "q")
    plain = tmp_path / "plain"
    streamload.convert(tmp_path / "q", plain, dtype="bfloat16")
    stored = load_file(plain / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in values.items())
    expected = streamload.load(plain).model.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert "quantization_config" not in loaded.config


def saved(folder: Path, model, config: dict, make, is_quantised) -> None:
    """A folder as its makers publish it: by the library's own names, some weights quantised."""
    model.save_pretrained(folder)
    plain = load_file(folder / "model.safetensors")
    stored = {}
    for name, tensor in plain.items():
        stored |= make(name, tensor)[0] if is_quantised(name, tensor) else {name: tensor}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))


def as_theirs(folder: Path, config) -> None:
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    ours = streamload.load_transformers(folder).model.state_dict()
    expected = theirs.state_dict()
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def test_experts_are_decoded_and_stacked_as_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    saved(tmp_path / "q", model, FP8, in_blocks, lambda name, _: "_proj" in name)
    settings = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    as_theirs(tmp_path / "q", settings)


def test_experts_of_gpt_oss_are_decoded_as_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=40, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=3,
        num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).bfloat16()

    def packed(name, tensor):
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, None

    def is_packed(name, tensor):
        return name.endswith(("gate_up_proj", "down_proj")) and tensor.dim() == 3

    saved(tmp_path / "q", model, {"quant_method": "mxfp4"}, packed, is_packed)
    as_theirs(tmp_path / "q", transformers.Mxfp4Config(dequantize=True))


class TestOtherFiles:
    """Parts that lie elsewhere than in the safetensors file of one folder."""

    @pytest.mark.parametrize("zipped", [True, False])
    @pytest.mark.parametrize("turned", [True, False])
    def test_torch_files(self, tmp_path, case, zipped, turned):
        path = case.write(tmp_path / "q")
        (path / "model.safetensors").unlink()
        if turned:  # its bytes are in another order
            q = case.stored["a.weight"].view(torch.uint8)
            case.stored["a.weight"] = q.t().contiguous().t().view(torch.float8_e4m3fn)
        target = path / "pytorch_model.bin"
        torch.save(case.stored, target, _use_new_zipfile_serialization=zipped)
        found = streamload.load_state_dict(path, dtype="bfloat16", chunk_bytes=999)
        assert found.keys() == case.values.keys()
        assert torch.equal(found["a.weight"], case.values["a.weight"].float().bfloat16())

    def test_scales_in_another_shard(self, tmp_path, case):
        path = case.write(tmp_path / "q")
        (path / "model.safetensors").unlink()
        weight_map = {}
        for at, (name, tensor) in enumerate(case.stored.items(), 1):
            weight_map[name] = f"model-{at:05d}-of-00003.safetensors"
            save_file({name: tensor}, path / weight_map[name])
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        found = streamload.load_state_dict(path, dtype="float32")
        assert torch.equal(found["a.weight"], case.values["a.weight"].float())

    def test_a_language_model_among_several_parts(self, tmp_path, case):
        path = case.write(tmp_path / "q")
        config = {"model_type": "none", "text_config": {"quantization_config": case.config, "n": 1}}
        (path / "config.json").write_text(json.dumps(config))
        found = streamload.load_state_dict(path, dtype="float32")
        assert torch.equal(found["a.weight"], case.values["a.weight"].float())
        streamload.convert(path, tmp_path / "plain", dtype="float16")
        written = json.loads((tmp_path / "plain/config.json").read_text())
        assert written["text_config"] == {"n": 1}
        with pytest.warns(UserWarning, match=r"quantization_config \(fp8\)|not applied"):
            streamload.load_state_dict(path)


def test_a_dict_that_names_scales_takes_what_is_stored(tmp_path, case):
    path = case.write(tmp_path / "q")
    module = nn.Module()
    module.q = nn.Parameter(torch.empty(300, 200, dtype=torch.float8_e4m3fn), False)
    module.s = nn.Parameter(torch.empty(3, 2), False)
    names = {"a.weight": "q", "a.weight_scale_inv": "s"}
    streamload.load_into(module, path, mapping=names, strict=False)
    assert torch.equal(module.s, case.stored["a.weight_scale_inv"])
    assert torch.equal(module.q.view(torch.uint8), case.stored["a.weight"].view(torch.uint8))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (3, 0, 4)])
def test_weights_without_values(tmp_path, shape):
    stored = {"a.weight": torch.empty(shape).to(torch.float8_e4m3fn)}
    stored |= {"a.weight_scale": torch.ones(1), "b": torch.ones(2)}
    path = Case(stored, {"quant_method": "fp8"}, {}).write(tmp_path / "q")
    found = streamload.load_state_dict(path, dtype="float32", workers=2)
    assert found["a.weight"].shape == shape
    assert found["b"].tolist() == [1, 1]


def test_a_row_of_numbers(tmp_path):
    q = eight_bits(torch.float8_e4m3fn, 77)
    stored = {"a.weight": q, "a.weight_scale": torch.tensor(0.3)}
    path = Case(stored, {"quant_method": "fp8"}, {}).write(tmp_path / "q")
    found = streamload.load_state_dict(path, dtype="float32")["a.weight"]
    assert torch.equal(found, q.float() * torch.tensor(0.3))


def test_later_loads_map_the_decoded_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE", str(tmp_path / "cache"))
    llama(tmp_path / "q", in_blocks, FP8)
    first = streamload.load(tmp_path / "q", cache=True)
    second = streamload.load(tmp_path / "q", cache=True)
    assert second.report.mode == "map"
    assert any("loaded from cache" in notice for notice in second.report.notices)
    expected = first.model.state_dict()
    for name, tensor in second.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_what_is_not_decoded_is_mapped(tmp_path):
    llama(tmp_path / "q", in_blocks, FP8)
    mapped = streamload.load(tmp_path / "q", mode="map")
    plain = streamload.load(tmp_path / "q", mode="stream")
    assert 0 < mapped.report.bytes_mapped < plain.report.bytes_written
    assert any("14 of 21 tensors are not mapped" in notice for notice in mapped.report.notices)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(mapped.model.state_dict()[name], tensor), name
