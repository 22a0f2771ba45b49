"""A quantised checkpoint and what it was converted to hold the same values."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import streamload
from streamload.verifying.verification import verify


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "fp8"
    path.mkdir()
    codes = torch.randint(0, 0x7F, (128, 256), dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"a.weight": codes, "a.weight_scale_inv": torch.rand(1, 2) + 0.5}
    save_file(tensors, path / "model.safetensors")
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    return path


def test_a_quantised_checkpoint_equals_what_it_was_converted_to(folder, tmp_path):
    streamload.convert(folder, tmp_path / "plain", dtype="bfloat16")
    report = verify(folder, against=tmp_path / "plain")
    assert report.ok, report


def test_a_value_that_differs_after_decoding_is_told(folder, tmp_path):
    streamload.convert(folder, tmp_path / "plain", dtype="bfloat16")
    values = streamload.load_state_dict(tmp_path / "plain")
    values["a.weight"][3, 5] = -1  # Every value of the codes above is positive.
    save_file(values, tmp_path / "plain" / "model.safetensors")
    assert not verify(folder, against=tmp_path / "plain").ok


def test_two_quantised_checkpoints_are_compared_as_they_are_stored(folder):
    assert verify(folder, against=folder).ok
