"""Every family back to published names: transformers loads it, nothing differs."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import streamload
from tests.families.partitions import cut, write

IDS = torch.arange(1, 12).view(1, -1)


def stored(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def check_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def logits_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(IDS).logits


def bare(tensors):
    """GPT-2's wrapper is optional in published files."""
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("options", [{}, {"layout": "stored"}], ids=["contiguous", "stored"])
def test_round_trip(checkpoint, tmp_path, options):
    model = streamload.load(checkpoint.folder, **options).model
    streamload.export(model, tmp_path / "out")
    check_same_tensors(bare(stored(tmp_path / "out")), bare(stored(checkpoint.folder)))
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(checkpoint.folder))


def test_shards_have_an_index(checkpoint, tmp_path):
    model = streamload.load(checkpoint.folder).model
    streamload.export(model, tmp_path, max_shard_bytes=30_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored(tmp_path).keys()
    assert len(set(index["weight_map"].values())) > 1
    assert torch.equal(logits_of(tmp_path), logits_of(checkpoint.folder))


def test_a_model_made_here_is_read_by_transformers(checkpoint, tmp_path):
    """Its configuration is our own, not the one of a file."""
    streamload.export(checkpoint.expected, tmp_path)
    torch.testing.assert_close(logits_of(tmp_path), logits_of(checkpoint.folder), atol=1e-6, rtol=0)


def test_merged_partitions_are_exported_whole(checkpoints, tmp_path):
    saved = checkpoints("gpt_neox-sequential")
    files = cut(saved.peer.state_dict(), 2, shares_bias=False)
    raw = write(tmp_path / "raw", files, saved.peer.config.to_dict())
    streamload.export(streamload.load(raw).model, tmp_path / "out")
    check_same_tensors(stored(tmp_path / "out"), stored(saved.folder))
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(saved.folder))
