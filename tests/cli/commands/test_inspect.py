"""``streamload inspect``: listings from headers, statistics of one tensor."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file


def test_listing_folds_blocks(run, tiny):
    result = run("inspect", tiny)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["wte.weight", "F32", "[320,", "64]", "80.0", "KiB"] in lines
    assert ["h.0…h.1", "\N{MULTIPLICATION SIGN}2", "422.5", "KiB"] in lines
    assert ["attn.c_attn.weight", "F32", "[64,", "192]", "48.0", "KiB"] in lines
    assert "30 tensors, 132,864 elements, 519.0 KiB in 1 file" in result.stdout
    assert "metadata: format=pt" in result.stdout
    assert result.stderr == ""


def test_all_lists_every_name(run, tiny):
    out = run("inspect", tiny, "--all").stdout
    names = load_file(f"{tiny}/model.safetensors")
    assert all(f"\n{name} " in out for name in names)


def test_json(run, tiny):
    result = json.loads(run("inspect", tiny, "--json").stdout)
    assert result["ok"] is True
    assert result["totals"] == {
        "tensors": 30,
        "elements": 132_864,
        "nbytes": 531_456,
        "nbytes_by_dtype": {"F32": 531_456},
    }
    assert result["metadata"] == {"format": "pt"}
    first = result["tensors"][0]
    assert (first["name"], first["dtype"], first["shape"]) == ("wte.weight", "F32", [320, 64])
    assert list(result["files"].values()) == [531_456]


def test_output_is_plain_when_piped(spawn, tiny):
    assert "\x1b" not in spawn("inspect", tiny, env={"FORCE_COLOR": "1"}).stdout


def test_one_tensor(run, tiny):
    expected = load_file(f"{tiny}/model.safetensors")["wte.weight"].double()
    facts = json.loads(run("inspect", tiny, "wte.weight", "--json").stdout)
    assert facts["shape"] == [320, 64]
    assert facts["min"] == expected.min().item()
    assert facts["mean"] == pytest.approx(expected.mean().item())
    assert facts["std"] == pytest.approx(expected.std(correction=0).item())
    assert facts["values"][:6] == expected.flatten()[:6].tolist()
    assert facts["values"][-1] == expected.flatten()[-1].item()
    assert facts["values_left_out"] == 320 * 64 - 12
    text = run("inspect", tiny, "wte.weight").stdout
    assert "F32 [320, 64], 80.0 KiB" in text
    assert "… 20,468 more …" in text


def test_statistics_over_several_blocks(run, tmp_path):
    values = torch.randn(3 << 20, generator=torch.Generator().manual_seed(0)) + 1000
    save_file({"x": values}, tmp_path / "x.safetensors")
    facts = json.loads(run("inspect", tmp_path / "x.safetensors", "x", "--json").stdout)
    assert facts["mean"] == pytest.approx(values.double().mean().item(), rel=1e-12)
    assert facts["std"] == pytest.approx(np.std(values.double().numpy()), rel=1e-9)


def test_odd_values(run, tmp_path):
    nan, inf = float("nan"), float("inf")
    save_file(
        {
            "odd": torch.tensor([0.0, nan, inf, -inf, 2.0], dtype=torch.bfloat16),
            "none": torch.empty(0, 4),
            "scalar": torch.tensor(7),
            "flags": torch.tensor([True, False]),
            "complex": torch.tensor([1 + 2j, 0j]),
        },
        tmp_path / "odd.safetensors",
    )

    def facts(name):
        result = run("inspect", tmp_path / "odd.safetensors", name, "--json")
        assert result.exit_code == 0
        assert run("inspect", tmp_path / "odd.safetensors", name).exit_code == 0
        return json.loads(result.stdout)

    odd = facts("odd")
    assert (odd["min"], odd["max"], odd["mean"], odd["std"]) == (0, 2, 1, 1)
    assert (odd["nan"], odd["inf"], odd["zero"]) == (1, 2, 1)
    assert odd["values"] == [0.0, "nan", "inf", "-inf", 2.0]
    assert facts("none")["min"] is None
    assert facts("scalar")["values"] == [7]
    assert facts("flags")["mean"] == 0.5
    assert facts("complex")["zero"] == 1


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("wte.weights", "'wte.weight'?"),
        # Whole segments first: of the same block, and wherever the segment stands.
        ("h.1.attn.c_atn.weight", "'h.1.attn.c_attn.weight', "),
        ("c_fc", "'h.0.mlp.c_fc.bias', 'h.1.mlp.c_fc.bias', 'h.0.mlp.c_fc.weight'?"),
        ("h.0.attn.bias.bias", "'h.0.attn.bias', "),
    ],
)
def test_names_that_are_near_are_suggested(run, tiny, typed, meant):
    result = run("inspect", tiny, typed)
    assert result.exit_code == 1
    assert f"no tensor named {typed!r}; did you mean {meant}" in result.stderr


def test_nothing_is_suggested_where_nothing_is_near(run, tiny):
    assert "did you mean" not in run("inspect", tiny, "encoder.0.xyz").stderr


def test_codes_are_called_codes(run, tmp_path):
    codes = torch.arange(1, 9, dtype=torch.float32).reshape(2, 4).to(torch.float8_e4m3fn)
    tensors = {"a.weight": codes, "a.weight_scale_inv": torch.ones(1, 1), "b.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    for name in ("a.weight", "a.weight_scale_inv"):
        text = run("inspect", tmp_path, name).stdout
        assert "notice: codes as they are stored, not values: a load decodes 'a.weight'" in text
    found = json.loads(run("inspect", tmp_path, "b.weight", "--json").stdout)
    assert found["notices"] == []


def test_a_name_of_the_model_is_told_the_stored_one(run, tiny):
    from streamload import load_state_dict

    name = next(n for n in load_state_dict(tiny) if n.startswith("blocks.0.") and "qkv" in n)
    result = run("inspect", tiny, name)
    assert result.exit_code == 1
    assert "that is the model's name, stored as 'h.0.attn.c_attn." in result.stderr


@pytest.mark.parametrize("text", ["../../blobs/" + "ab" * 20, "{", "[]", '{"n_layer": '])
def test_a_damaged_configuration_is_1_and_the_tensors_are_listed_all_the_same(
    run, tiny, tmp_path, text
):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny, folder)
    (folder / "config.json").write_text(text)
    result = run("inspect", folder)
    assert result.exit_code == 1
    assert "attn.c_attn.weight" in result.stdout
    assert "config.json" in result.stderr
    assert result.stderr.count("\n") == 1
    found = json.loads(run("inspect", folder, "--json").stdout)
    assert found["ok"] is False
    assert "config.json" in found["error"]


@pytest.mark.parametrize("how", ["fsdp", "tp"])
def test_it_says_what_each_of_several_ranks_would_read(run, tiny, how):
    order = ["--shard", how, "--ranks", 4]
    found = json.loads(run("inspect", tiny, *order, "--json").stdout)
    planned = json.loads(run("plan", tiny, *order, "--json").stdout)
    assert found["ranks"] == planned["ranks"]
    assert len(found["ranks"]) == 4
    lines = run("inspect", tiny, *order).stdout.splitlines()
    assert [line.split()[0] for line in lines[-6:]] == ["rank", "0", "1", "2", "3", "all"]
    assert lines[:-7] == run("inspect", tiny).stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shard", "tp"], "go together"),
        (["wte.weight", "--shard", "tp", "--ranks", "2"], "not for one tensor"),
        *((["--timeout-s", value], "--timeout-s") for value in ("nan", "0", "-1", "inf", "soon")),
    ],
)
def test_wrong_usage_is_told_before_anything_is_opened(run, tiny, arguments, text):
    result = run("inspect", tiny, *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
