"""``mp_rank_NN_model_states.pt`` of a sequential GPT-NeoX, and of what else DeepSpeed saved."""

import json

import pytest
import torch
from safetensors.torch import load_file

import streamload
from streamload.core.errors import CheckpointError
from tests.families.partitions import cut, write
from tests.models.peers import check_agrees


def as_rank_files(folder, files, config):
    """The layers of each rank in one file, under the numbers of the pipeline."""
    folder.mkdir(parents=True)
    ranks = {}
    for (number, rank), tensors in files.items():
        named = {f"sequential.{number}.{key}": tensor for key, tensor in tensors.items()}
        ranks.setdefault(rank, {}).update(named)
    for rank, tensors in ranks.items():
        state = {"module": tensors, "optimizer": {"m": torch.ones(3)}, "global_steps": 5}
        torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def sequential(checkpoints, tmp_path):
    """Writes a family's checkpoint both ways; returns the folders and what they hold."""

    def make(name="gpt_neox", ranks=2, change=None):
        saved = checkpoints(name)
        config = saved.peer.config.to_dict()
        parallel = saved.peer.config.use_parallel_residual
        files = cut(saved.peer.state_dict(), ranks, shares_bias=parallel)
        if change is not None:
            change(files)
        return as_rank_files(tmp_path / "ranks", files, config), files, saved

    return make


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        streamload.load(folder)
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt_neox", "gpt_neox-sequential"])
def test_they_are_the_model_of_the_layers_files(sequential, tmp_path, name, ranks):
    folder, files, saved = sequential(name, ranks)
    layers = write(tmp_path / "layers", files, saved.peer.config.to_dict())
    with streamload.open_checkpoint(folder) as one, streamload.open_checkpoint(layers) as other:
        assert list(one.catalog) == list(other.catalog)
        assert one.config()[0] == other.config()[0]
    found, expected = streamload.load(folder), streamload.load(layers)
    assert found.report.summary() == expected.report.summary()
    for local, tensor in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[local], tensor), local
    check_agrees(saved.peer, found.model)


def test_convert_gives_a_published_folder(sequential, tmp_path):
    folder, _, saved = sequential()
    report = streamload.convert(folder, tmp_path / "new")
    assert report.names == "published"
    found = load_file(tmp_path / "new" / "model.safetensors")
    for name, tensor in saved.peer.state_dict().items():
        tensor_found = found.get(name, found.get(name.replace("lm_head", "embed_out")))
        torch.testing.assert_close(tensor_found, tensor, atol=1e-6, rtol=1e-6)


def test_in_the_folder_of_a_training_step(sequential, tmp_path):
    folder, _, saved = sequential()
    (tmp_path / "run").mkdir()
    folder.rename(tmp_path / "run" / "global_step7")
    (tmp_path / "run" / "latest").write_text("global_step7")
    # The optimizer's state of the stages that leave the weights whole.
    zero = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({}, tmp_path / "run" / "global_step7" / zero)
    check_agrees(saved.peer, streamload.load(tmp_path / "run").model)


def test_some_layers(sequential):
    folder, _, saved = sequential()
    model = streamload.load(folder, layers=[1]).model
    assert len(model.blocks) == 1
    expected = saved.expected.blocks[1].attn.qkv.weight
    assert torch.equal(model.blocks[0].attn.qkv.weight, expected)


def test_a_rank_that_is_absent(sequential):
    folder, _, _ = sequential(ranks=4)
    (folder / "mp_rank_01_model_states.pt").unlink()
    assert "mp_rank_01_model_states.pt is absent" in refusal(folder)
    (folder / "mp_rank_03_model_states.pt").unlink()
    (folder / "mp_rank_02_model_states.pt").unlink()
    assert "is a rank missing?" in refusal(folder)


def test_layers_and_keys_that_are_absent(sequential):
    def drop(files):
        for rank in (0, 1):
            del files[3, rank]
        del files[2, 1]["mlp.dense_h_to_4h.bias"]

    folder, _, _ = sequential(change=drop)
    assert "sequential.3 is absent (block 1)" in refusal(folder)


def test_a_key_that_one_rank_lacks(sequential):
    folder, _, _ = sequential(change=lambda files: files[2, 1].pop("mlp.dense_h_to_4h.bias"))
    text = refusal(folder)
    assert "mlp.dense_h_to_4h.bias" in text
    assert "mp_rank_01_model_states.pt" in text


def test_a_layer_that_one_rank_lacks(sequential):
    folder, _, _ = sequential(change=lambda files: files.pop((3, 1)))
    assert "sequential.3 of mp_rank_01 is absent" in refusal(folder)


def test_a_key_of_no_layer(sequential):
    folder, _, _ = sequential(change=lambda files: files[2, 0].update({"x": torch.ones(1)}))
    path = folder / "mp_rank_00_model_states.pt"
    state = torch.load(path)
    state["module"]["stray.weight"] = torch.ones(2)
    torch.save(state, path)
    assert "'stray.weight' belongs to no layer" in refusal(folder)


def test_one_file_of_any_model(tmp_path):
    """What DeepSpeed saves of a model that it leaves whole."""
    weights = {"a.w": torch.ones(2, 3), "b": torch.zeros(4)}
    torch.save({"module": weights, "epoch": 3}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({}, tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    found = streamload.load_state_dict(tmp_path)
    assert found.keys() == weights.keys()
    with streamload.open_checkpoint(tmp_path) as source:
        assert any("zero_to_fp32" in notice for notice in source.catalog.notices)


def test_several_files_of_another_model(tmp_path):
    for rank in range(2):
        state = {"module": {"a.w": torch.ones(2, 3)}}
        torch.save(state, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    text = refusal(tmp_path)
    assert "no layers of a sequential GPT-NeoX" in text
    assert "mp_rank_01" in text
