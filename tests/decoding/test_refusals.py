"""What cannot be decoded is refused by name, whoever asks, and before anything moves."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import streamload
from tests.decoding.quantised import CASES, Case, state

# Case, the tensor that is changed, what it becomes (None: left out), what the refusal says.
FAULTS = [
    ("fp8 blocks", "a.weight_scale_inv", torch.ones(2, 2), r"\[2, 2\].*\[2, 3\].*128 x 128"),
    ("fp8 blocks", "a.weight_scale_inv", torch.ones(1), r"shape \[1\].*\[2, 3\]"),
    ("fp8 ragged", "a.weight_scale_inv", torch.ones(2, 1), r"\[2, 1\].*\[3, 2\]"),
    ("fp8 blocks", "a.weight_scale_inv", torch.ones(2, 3).long(), "is I64"),
    ("fp8 blocks", "a.weight_scale_inv", None, "needs one scale, but has none"),
    ("fp8 tensor", "a.weight_scale", torch.ones(2), r"\[2\].*\[40, 1\] \(one for each row\)"),
    ("fp8 rows [M, 1]", "a.weight_scale", torch.ones(41, 1), r"\[41, 1\].*\[40, 1\]"),
    ("fp4 beside fp8", "experts.0.w1.scale", torch.ones(24, 2), r"\[24, 2\].*\[24, 3\]"),
    ("mxfp4", "experts.gate_up_proj_scales", torch.ones(3, 40, 3).byte(), r"\[3, 40, 4\]"),
    ("mxfp4", "experts.gate_up_proj_scales", None, "gate_up_proj_scales', which is not there"),
    ("mxfp4", "experts.gate_up_proj_blocks", torch.ones(3, 40, 4, 8).byte(), "not U8"),
    ("mxfp4", "experts.gate_up_proj_blocks", None, "gate_up_proj_scales' lacks"),
    ("int8 rows", "a.weight_scale", torch.ones(29, 1), r"\[29, 1\]"),
    ("int8 rows", "a.weight_scale", None, "weight_scale', which is not there"),
    ("int8 zeros", "a.weight_zero_point", torch.ones(29, 1).char(), "zero_point"),
    ("int4", "a.weight_scale", torch.ones(24, 3), r"\[24, 3\].*\[24, 2\]"),
    ("int4", "a.weight_packed", torch.ones(24, 16), "is F32, not I32"),
    ("int4 zeros", "a.weight_zero_point", torch.ones(2, 2).int(), "zero_point"),
    ("int4", "a.weight_g_idx", torch.ones(128).int(), "weight_g_idx"),
    ("nvfp4", "a.weight_global_scale", torch.ones(2), "one number is needed"),
    ("nvfp4", "a.weight_scale", torch.ones(20, 2), r"\[20, 4\]"),
    ("gptq", "a.scales", torch.ones(3, 48).half(), r"\[3, 48\].*\[2, 48\]"),
    ("gptq", "a.qzeros", None, "a.qzeros', which is not there"),
    ("gptq", "a.qzeros", torch.ones(2, 7).int(), r"\[2, 7\].*\[2, 6\]"),
    ("gptq", "a.g_idx", torch.ones(127).int(), r"\[127\].*\[128\]"),
    ("gptq", "a.qweight", torch.ones(16, 48), "not I32"),
    ("gptq", "a.weight", torch.ones(48, 128), "stored twice"),
    ("modelopt nvfp4", "a.pre_quant_scale", torch.ones(64), "pre_quant_scale"),
    ("awq", "a.scales", torch.ones(2, 47).half(), r"\[2, 47\]"),
    ("awq", "a.qweight", None, "a.qzeros' lacks"),
    ("bitsandbytes", "a.weight.absmax", torch.ones(71), r"\[71\].*blocks of 64 needs F32 \[72\]"),
    ("bitsandbytes", "a.weight.quant_map", None, "quant_map', which is not there"),
    ("bitsandbytes", "a.weight.quant_state.bitsandbytes__nf4", None, "absmax' lacks"),
    ("bitsandbytes", "a.weight.quant_state.bitsandbytes__nf4", state(shape=5), "shape must be"),
    ("bitsandbytes", "a.weight.quant_state.bitsandbytes__nf4", torch.ones(3), "is no JSON"),
    ("bitsandbytes", "a.weight", torch.ones(9, 1).byte(), r"\[9, 1\].*needs U8 \[2304\]"),
    ("bitsandbytes, nested", "a.weight.nested_absmax", torch.ones(3), r"nested_absmax.*\[3\]"),
    ("bitsandbytes int8", "a.SCB", torch.ones(29), r"\[29\].*one for each row"),
    ("bitsandbytes int8", "a.SCB", None, "a.SCB', which is not there"),
]


@pytest.mark.parametrize(("kind", "name", "value", "said"), FAULTS)
def test_parts_that_do_not_fit(tmp_path, kind, name, value, said):
    case = CASES[kind]()
    case.stored[name] = value
    stored = {n: t for n, t in case.stored.items() if t is not None}
    path = Case(stored, case.config, {}).write(tmp_path / "q")
    refused(path, rf"config.json has quantization_config \({case.config['quant_method']}\).*{said}")


def refused(path, said) -> None:
    module = nn.Linear(2, 2)
    before = module.weight.clone()
    for call in (
        lambda: streamload.load_state_dict(path, dtype="bfloat16"),
        lambda: streamload.convert(path, path.parent / "out", dtype="bfloat16"),
        lambda: streamload.load_into(module, path),
        lambda: list(streamload.iter_tensors(path, dtype="float32")),
    ):
        with pytest.raises(streamload.StreamloadError, match=said):
            call()
    assert torch.equal(module.weight, before)
    assert not (path.parent / "out").exists()
    assert streamload.plan(module, path).problems


CONFIGS = [
    ("gptq", {"bits": 4, "is_marlin_format": True}, "checkpoint_format"),
    ("compressed-tensors", {"config_groups": {"g": {"weights": {"group_size": 0}}}}, "group_size"),
    ("fp8", {"weight_block_size": [128]}, "weight_block_size"),
    ("fp8", {"weight_block_size": [0, 128]}, "weight_block_size"),
    ("fp8", {"weight_block_size": "128"}, "weight_block_size"),
    ("gptq", {"bits": 3}, "3 bits"),
    ("gptq", {"bits": "4"}, "bits must be a whole number"),
    ("gptq", {"bits": 4, "group_size": 0}, "group_size"),
    ("gptq", {"bits": 4, "checkpoint_format": "marlin"}, "marlin"),
    ("awq", {"bits": 4, "version": "gemv"}, "gemv"),
    ("compressed-tensors", {"format": "sparse-24-bitmask"}, "sparse-24-bitmask"),
    ("compressed-tensors", {"format": "marlin-24"}, "marlin-24"),
    ("compressed-tensors", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
]


@pytest.mark.parametrize(("method", "config", "said"), CONFIGS)
def test_configurations_that_make_no_sense_or_name_what_is_not_decoded(
    tmp_path, method, config, said
):
    stored = {**CASES["gptq"]().stored, **CASES["fp8 blocks"]().stored}
    path = Case(stored, {"quant_method": method, **config}, {}).write(tmp_path / "q")
    refused(path, said)


@pytest.mark.parametrize("method", ["hqq", "aqlm", "quanto", "torchao", "x" * 500, "", None, 5])
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_every_other_method_is_refused_with_its_name(tmp_path, run_command, method, field):
    folder = tmp_path / "q"
    folder.mkdir()
    save_file({"a.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    config = {field: {"quant_method": method, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    name = str(method)[:20] if method else "of an unnamed method"
    said = rf"q: the weights are quantised: config.json has {field} \({name}"
    refused(folder, said)
    for call in (streamload.load_state_dict, lambda p: streamload.convert(p, tmp_path / "copy")):
        with pytest.raises(streamload.StreamloadError, match=said):
            call(folder)
    done = run_command("inspect", folder)
    assert done.exit_code == 0
    assert f"has {field} ({name}" in done.stdout.replace("\n", "")


@pytest.fixture
def run_command():
    from click.testing import CliRunner

    from streamload.cli.group import main

    return lambda *words: CliRunner().invoke(main, [str(word) for word in words])


def test_inspect_and_plan_say_what_is_decoded_from_what(tmp_path, run_command):
    case = CASES["fp4 beside fp8"]()
    path = case.write(tmp_path / "q")
    done = run_command("inspect", path)
    assert "decoded: 1 tensor of fp8 in blocks of 128 x 128, 1 tensor of fp4 in blocks" in (
        done.stdout.replace("\n", "")
    )
    with streamload.empty_weights():
        module = nn.ModuleDict({"attn": nn.ModuleDict({"wq": nn.Linear(256, 128, bias=False)})})
    plan = streamload.plan(module, path, strict=False)
    (entry,) = plan.report.loaded
    assert (entry.stored_dtype, entry.dtype) == ("float8_e4m3fn", "bfloat16")
    assert entry.transform == "fp8 in blocks of 128 x 128"
    assert set(plan.unexpected) == {"experts.0.w1.weight", "norm.weight"}


def test_a_group_out_of_range_is_found_while_it_is_read(tmp_path):
    case = CASES["gptq in any order"]()
    case.stored["a.g_idx"][5] = 2
    path = case.write(tmp_path / "q")
    with pytest.raises(streamload.CheckpointError, match=r"g_idx.*a group is none of 2"):
        streamload.load_state_dict(path, dtype="float32")
