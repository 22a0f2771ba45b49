"""Raw GPT-NeoX partitions: files and keys as published, the same weights for any cut."""

import os

import pytest
import torch

from streamload.core.errors import WriteError
from streamload.synthesis import synthesize_neox_raw

SMALL = {"layers": 2, "hidden": 64, "vocab_size": 512}
STEP = "global_step150000"


def layer(folder, number, rank):
    path = folder / STEP / f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
    return torch.load(path, weights_only=True)


def test_files_are_the_published_ones(tmp_path):
    report = synthesize_neox_raw(tmp_path, layers=44, hidden=32, vocab_size=256)
    names = sorted(os.listdir(tmp_path / STEP))
    numbers = [0, *range(2, 46), 47, 48]
    expected = [f"layer_{n:02d}-model_{p:02d}-model_states.pt" for n in numbers for p in (0, 1)] + [
        f"mp_rank_{n:02d}_model_states.pt" for n in range(8)
    ]
    assert names == sorted(expected)
    assert sorted(os.listdir(tmp_path)) == ["20B_tokenizer.json", "configs", STEP, "latest"]
    assert (tmp_path / "latest").read_text() == STEP
    assert report.tensors == 2 * (1 + 44 * 12 + 2 + 1)


def test_shapes_and_types_of_a_block(tmp_path):
    synthesize_neox_raw(tmp_path, **SMALL)
    tensors = layer(tmp_path, 2, 1)
    assert {name: list(t.shape) for name, t in tensors.items()} == {
        "input_layernorm.weight": [64],
        "input_layernorm.bias": [64],
        "post_attention_layernorm.weight": [64],
        "post_attention_layernorm.bias": [64],
        "attention.query_key_value.weight": [96, 64],
        "attention.query_key_value.bias": [96],
        "attention.dense.weight": [64, 32],
        "attention.dense.bias": [64],
        "mlp.dense_h_to_4h.weight": [128, 64],
        "mlp.dense_h_to_4h.bias": [128],
        "mlp.dense_4h_to_h.weight": [64, 128],
        "mlp.dense_4h_to_h.bias": [64],
    }
    assert {t.dtype for t in tensors.values()} == {torch.float16}
    assert list(layer(tmp_path, 5, 0)) == ["norm.weight", "norm.bias"]
    assert layer(tmp_path, 6, 0)["final_linear.weight"].shape == (256, 64)


@pytest.mark.parametrize("partitions", [2, 4])
def test_the_merged_weights_do_not_depend_on_the_cut(tmp_path, partitions):
    synthesize_neox_raw(tmp_path / "whole", partitions=1, **SMALL)
    synthesize_neox_raw(tmp_path / "cut", partitions=partitions, **SMALL)
    for number in (0, 2, 3, 5, 6):
        whole = layer(tmp_path / "whole", number, 0)
        ranks = [layer(tmp_path / "cut", number, rank) for rank in range(partitions)]
        for key, expected in whole.items():
            parts = [rank[key] for rank in ranks]
            if key in ("attention.dense.bias", "mlp.dense_4h_to_h.bias"):
                merged = sum(part.float() for part in parts)
                assert torch.allclose(merged, expected.float(), rtol=1e-3, atol=1e-6)
            elif key in ("attention.dense.weight", "mlp.dense_4h_to_h.weight"):
                assert torch.equal(torch.cat(parts, 1), expected)
            elif "norm" in key:
                assert all(torch.equal(part, expected) for part in parts)
            else:
                assert torch.equal(torch.cat(parts, 0), expected)


def test_sparse_files_take_no_room(tmp_path):
    sizes = {"layers": 1, "hidden": 1024, "vocab_size": 1024}
    synthesize_neox_raw(tmp_path / "full", **sizes)
    synthesize_neox_raw(tmp_path / "sparse", sparse=True, **sizes)
    name = f"{STEP}/layer_02-model_00-model_states.pt"
    full, sparse = os.stat(tmp_path / "full" / name), os.stat(tmp_path / "sparse" / name)
    assert abs(sparse.st_size - full.st_size) < 4096
    assert sparse.st_blocks * 512 < full.st_size / 10
    assert layer(tmp_path / "sparse", 2, 0)["mlp.dense_h_to_4h.weight"].shape == (2048, 1024)


def test_another_checkpoint_is_refused_or_replaced(tmp_path):
    synthesize_neox_raw(tmp_path, **SMALL)
    with pytest.raises(WriteError, match="another checkpoint"):
        synthesize_neox_raw(tmp_path, **SMALL)
    synthesize_neox_raw(tmp_path, **{**SMALL, "layers": 1}, force=True)
    assert not (tmp_path / STEP / "layer_06-model_00-model_states.pt").exists()
    assert (tmp_path / STEP / "layer_05-model_00-model_states.pt").exists()


def test_interrupted_writing_leaves_nothing(tmp_path):
    def stop(done_bytes, total_bytes, file):
        if "layer_03" in file:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize_neox_raw(tmp_path / "new", progress=stop, **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_cannot_be_cut_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be cut into 3 partitions"):
        synthesize_neox_raw(tmp_path, partitions=3, **SMALL)
    with pytest.raises(ValueError, match="not a multiple of 16"):
        synthesize_neox_raw(tmp_path, hidden=50)
    with pytest.raises(ValueError, match="at least one layer"):
        synthesize_neox_raw(tmp_path, layers=0)


def test_configuration_is_yaml(tmp_path):
    import yaml

    synthesize_neox_raw(tmp_path, **SMALL)
    with open(tmp_path / "configs/20B.yml") as file:
        config = yaml.safe_load(file)
    assert (config["num-layers"], config["hidden-size"]) == (2, 64)
    assert config["model-parallel-size"] == 2
    assert config["hidden-size"] // config["num-attention-heads"] == 16
