"""Raw partitions cut from a GPT-NeoX of transformers: the same model, whatever the cut."""

import json

import pytest
import torch

import streamload
from streamload.core.errors import CheckpointError, PlanError, StreamloadError
from tests.families.partitions import ROW_PARALLEL, cut, write
from tests.models.peers import check_agrees

EXACT_BY_ARITHMETIC = ("ln1.", "ln2.", "final_ln.", "out_proj.bias", "fc2.bias")


@pytest.fixture
def raw(checkpoints, tmp_path):
    """Writes a family's checkpoint as partitions; returns the folder and what it holds."""

    def make(name="gpt_neox", ranks=2, change=None):
        saved = checkpoints(name)
        parallel = saved.peer.config.use_parallel_residual
        files = cut(saved.peer.state_dict(), ranks, shares_bias=parallel)
        if change is not None:
            change(files)
        return write(tmp_path / "raw", files, saved.peer.config.to_dict()), saved

    return make


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt_neox", "gpt_neox-sequential"])
def test_logits_and_values(raw, name, ranks):
    folder, saved = raw(name, ranks)
    loaded = streamload.load(folder)
    report = loaded.report
    assert report.summary().endswith("missing=0 unexpected=0 shape_mismatch=0")
    assert all("rotary_emb.inv_freq" in n for n in report.ignored)
    expected = saved.expected.state_dict()
    for local, tensor in loaded.model.state_dict().items():
        if any(part in local for part in EXACT_BY_ARITHMETIC):
            torch.testing.assert_close(tensor, expected[local], atol=1e-6, rtol=1e-6)
        else:
            assert torch.equal(tensor, expected[local]), local
    check_agrees(saved.peer, loaded.model)


@pytest.mark.parametrize(
    ("name", "words"),
    [("gpt_neox", "summed over the partitions"), ("gpt_neox-sequential", "taken once")],
)
def test_the_report_says_how_biases_were_merged(raw, name, words):
    folder, _ = raw(name)
    assert any(words in notice for notice in streamload.load(folder).report.notices)


def test_shares_need_not_be_equal(raw):
    def unequal(files):
        for (_, rank), tensors in files.items():
            for module in ROW_PARALLEL:
                if f"{module}.bias" in tensors:
                    tensors[f"{module}.bias"] *= (0.5, 1.5)[rank]

    folder, saved = raw(change=unequal)
    model = streamload.load(folder).model
    found, expected = model.blocks[1].mlp.fc2.bias, saved.expected.blocks[1].mlp.fc2.bias
    torch.testing.assert_close(found, expected)


def test_bfloat16_is_merged_in_float32(raw):
    folder, saved = raw("gpt_neox-sequential", 4)
    model = streamload.load(folder, dtype="bfloat16").model
    for name, tensor in saved.expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16()), name


def test_some_layers_need_only_their_files(raw):
    folder, saved = raw()
    for file in folder.glob("layer_03-*"):
        file.unlink()
    loaded = streamload.load(folder, layers=[0, 2])
    assert len(loaded.model.blocks) == 2
    assert loaded.report.summary().endswith("missing=0 unexpected=0 shape_mismatch=0")
    for mine, theirs in ((0, 0), (1, 2)):
        found = loaded.model.blocks[mine].attn.qkv.weight
        assert torch.equal(found, saved.expected.blocks[theirs].attn.qkv.weight)
    assert torch.equal(loaded.model.lm_head.weight, saved.expected.lm_head.weight)


def test_norms_that_drifted_apart_are_refused_or_averaged(raw):
    def drift(files):
        for (_, rank), tensors in files.items():
            if "input_layernorm.weight" in tensors:
                tensors["input_layernorm.weight"] += (-0.01, 0.01)[rank]

    folder, saved = raw(change=drift)
    with pytest.raises(StreamloadError, match=r"input_layernorm.weight"):
        streamload.load(folder)
    model = streamload.load(folder, replicas="average").model
    expected = saved.expected.blocks[0].ln1.scale
    torch.testing.assert_close(model.blocks[0].ln1.scale, expected, atol=1e-6, rtol=0)


def test_state_dict_and_module_of_ones_own(raw):
    folder, saved = raw()
    tensors = streamload.load_state_dict(folder)
    assert tensors.keys() == saved.expected.state_dict().keys()
    with streamload.empty_weights():
        model = type(saved.expected)(saved.expected.config)
    report = streamload.load_into(model, folder)
    assert report.model_type == "gpt_neox"
    assert all(torch.equal(p, tensors[name]) for name, p in model.state_dict().items())


def test_a_padded_vocabulary_shows_the_merged_shape(raw):
    folder, saved = raw()
    config = saved.peer.config.to_dict() | {"vocab_size": 90}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, PlanError), match=r"96.*90|90.*96"):
        streamload.load(folder)


def test_parts_that_do_not_make_a_whole_are_refused(raw):
    def shorten(files):
        files[2, 1]["attention.query_key_value.weight"] = torch.zeros(9, 32)

    folder, _ = raw(change=shorten)
    with pytest.raises(StreamloadError, match=r"query_key_value.weight"):
        streamload.load(folder)


def test_a_key_that_one_rank_lacks_is_named(raw):
    def drop(files):
        del files[2, 1]["mlp.dense_h_to_4h.bias"]

    folder, _ = raw(change=drop)
    with pytest.raises(StreamloadError, match=r"mlp.dense_h_to_4h.bias") as caught:
        streamload.load(folder)
    assert "layer_02-model_01" in str(caught.value)


def test_a_rank_that_is_gone_altogether_is_refused(raw):
    folder, _ = raw()
    for file in folder.glob("*model_01*"):
        file.unlink()
    with pytest.raises(StreamloadError):
        streamload.load(folder)
