"""A transformers model exported: under the names and in the layout that it is published in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import streamload
from streamload import PlanError, convert, export, load_transformers
from tests.hf.their_dozen import DOZEN, differences, saved


@pytest.mark.parametrize("name", DOZEN)
def test_an_export_is_what_the_library_saves(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "saved")
    model = load_transformers(folder).model
    report = export(model, tmp_path / "exported")
    assert report.names == "published"
    wanted = load_file(folder / "model.safetensors")
    found = load_file(tmp_path / "exported" / "model.safetensors")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    again = type(model).from_pretrained(tmp_path / "exported")
    assert not differences(model, again)


def test_a_model_that_was_never_loaded_is_exported_too(tmp_path: Path) -> None:
    model = DOZEN["mixtral"]().eval()
    export(model, tmp_path / "half", dtype="bfloat16", max_shard_bytes=20_000)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert type(again) is type(model)
    assert again.config.dtype == torch.bfloat16
    wanted = dict(model.bfloat16().named_parameters())
    assert all(torch.equal(p, wanted[name]) for name, p in again.named_parameters())


def test_a_model_without_values_is_refused(tmp_path: Path) -> None:
    with streamload.empty_weights():
        model = DOZEN["llama"]()
    with pytest.raises(PlanError, match="no values to export"):
        export(model, tmp_path / "empty")
    assert not (tmp_path / "empty").exists()


def test_the_module_s_own_names_are_there_for_the_asking(tmp_path: Path) -> None:
    model = DOZEN["mixtral"]()
    names = {name: name for name in model.state_dict()}
    export(model, tmp_path / "own.safetensors", mapping=names)
    assert load_file(tmp_path / "own.safetensors").keys() == names.keys()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "qwen3", "bert"])
def test_a_file_with_the_module_s_names_is_converted_back(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "saved")
    model = load_transformers(folder).model
    tensors = {key: t.clone() for key, t in model.state_dict().items()}
    (tmp_path / "own").mkdir()
    save_file(tensors, tmp_path / "own" / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "back")
    wanted = load_file(folder / "model.safetensors")
    found = load_file(tmp_path / "back" / "model.safetensors")
    if name in ("mixtral", "qwen3_moe", "deepseek_v3"):
        assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    again = type(model).from_pretrained(tmp_path / "back")
    assert not differences(model, again)


def test_published_names_are_kept_by_a_conversion(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "saved")
    convert(folder, tmp_path / "half", dtype="bfloat16")
    wanted = load_file(folder / "model.safetensors")
    found = load_file(tmp_path / "half" / "model.safetensors")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key].bfloat16(), found[key]) for key in wanted)
