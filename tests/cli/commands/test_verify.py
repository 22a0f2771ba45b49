"""``streamload verify``."""

import json

import torch
from safetensors.torch import save_file


def test_reads_everything(run, tiny):
    result = run("verify", tiny)
    assert result.exit_code == 0
    assert "read 30 tensors" in result.stdout
    assert "all values are finite" in result.stdout


def test_values_not_finite_fail_on_request(run, tmp_path):
    save_file({"x": torch.tensor([float("nan")])}, tmp_path / "x.safetensors")
    result = run("verify", tmp_path / "x.safetensors")
    assert result.exit_code == 0
    assert "'x': 1 NaN, 0 infinite" in result.stdout
    assert run("verify", tmp_path / "x.safetensors", "--strict").exit_code == 1


def test_a_difference_is_exit_code_1(run, tiny, tmp_path):
    assert run("convert", tiny, tmp_path / "half", "--dtype", "bfloat16").exit_code == 0
    result = run("verify", tmp_path / "half", "--against", tiny, "--json")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["differences"]) == 28
    result = run("verify", tmp_path / "half", "--against", tiny, "--dtype", "bfloat16")
    assert result.exit_code == 0
    assert "no difference" in result.stdout


def test_other_dtypes_are_one_line(run, tiny, tmp_path):
    assert run("convert", tiny, tmp_path / "half", "--dtype", "bfloat16").exit_code == 0
    result = run("verify", tmp_path / "half", "--against", tiny)
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if "against" in line]
    assert lines == [
        "28 tensors: bfloat16 against float32; compare after a cast with --dtype bfloat16"
    ]


def test_dtype_alone_is_wrong_usage(run, tiny):
    assert run("verify", tiny, "--dtype", "float16").exit_code == 2
