"""Every family as transformers saves it: values, logits and greedy tokens as transformers'."""

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import streamload
from tests.models.peers import check_agrees

IDS = torch.arange(1, 12).view(1, -1)


def bits(tensor):
    size = tensor.element_size()
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32}[size])


def check_same_values(model, expected, dtype=torch.float32):
    found, wanted = model.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        assert tensor.dtype == dtype, name
        assert torch.equal(bits(tensor), bits(wanted[name].to(dtype))), name


def clean(report):
    return report.ok and not (report.missing or report.unexpected or report.shape_mismatch)


def test_logits_and_greedy_tokens(checkpoint):
    loaded = streamload.load(checkpoint.folder)
    assert clean(loaded.report)
    assert not loaded.model.training
    assert loaded.report.model_type == checkpoint.peer.config.model_type
    check_same_values(loaded.model, checkpoint.expected)
    check_agrees(checkpoint.peer, loaded.model)


def test_bfloat16_has_the_bits_of_a_cast_afterwards(checkpoint):
    loaded = streamload.load(checkpoint.folder, dtype=torch.bfloat16)
    check_same_values(loaded.model, checkpoint.expected, torch.bfloat16)
    assert loaded.report.dtype == "bfloat16"


@pytest.mark.parametrize("options", [{"mode": "map"}, {"layout": "stored"}], ids=["map", "stored"])
def test_other_ways_of_loading_give_the_same_model(checkpoint, options):
    loaded = streamload.load(checkpoint.folder, **options)
    check_same_values(loaded.model, checkpoint.expected)
    with torch.inference_mode():
        expected = checkpoint.expected(IDS)
        torch.testing.assert_close(loaded.model(IDS), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"mode": "map"}], ids=["default", "map"])
def test_published_files_are_mapped_to_the_last_byte(checkpoint, options):
    report = streamload.load(checkpoint.folder, **options).report
    assert report.notices == ()
    assert (report.mode, report.bytes_read, report.bytes_written) == ("map", 0, 0)
    unique = {p.data_ptr(): p.nbytes for p in checkpoint.expected.parameters()}
    assert report.bytes_mapped == sum(unique.values())


def test_local_names_of_version_0_1_are_read(checkpoints, tmp_path):
    """They had queries, keys and values in one matrix."""
    for name in ("llama3", "biases-tied", "mistral", "qwen2", "qwen3"):
        saved = checkpoints(name)
        tensors = saved.expected.state_dict()
        if saved.peer.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        for layer in range(len(saved.expected.blocks)):
            for end in ("weight", "bias"):
                names = [f"blocks.{layer}.attn.{part}.{end}" for part in "qkv"]
                if names[0] in tensors:
                    parts = [tensors.pop(part) for part in names]
                    tensors[f"blocks.{layer}.attn.qkv.{end}"] = torch.cat(parts)
        folder = tmp_path / name
        folder.mkdir()
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text((saved.folder / "config.json").read_text())
        loaded = streamload.load(folder)
        assert clean(loaded.report)
        assert loaded.report.bytes_read == 0
        check_same_values(loaded.model, saved.expected)


def test_some_layers_make_a_model_of_just_these(checkpoint):
    loaded = streamload.load(checkpoint.folder, layers=[0, 2])
    assert clean(loaded.report)
    assert len(loaded.model.blocks) == 2
    for mine, theirs in zip((0, 1), (0, 2), strict=True):
        check_same_values(loaded.model.blocks[mine], checkpoint.expected.blocks[theirs])
    assert torch.equal(loaded.model.tok_embed.weight, checkpoint.expected.tok_embed.weight)
    with torch.inference_mode():
        assert loaded.model(IDS).shape[:2] == (1, 11)


def test_some_layers_of_a_module_leave_the_others(checkpoint):
    model = deepcopy(checkpoint.expected)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    before = list(model.parameters())
    report = streamload.load_into(model, checkpoint.folder, layers=[1])
    assert clean(report)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    check_same_values(model.blocks[1], checkpoint.expected.blocks[1])
    for untouched in (0, 2):
        assert all((p == 7.0).all() for p in model.blocks[untouched].parameters())


def test_ties_are_one_tensor(checkpoint):
    model = streamload.load(checkpoint.folder).model
    tied = checkpoint.peer.config.tie_word_embeddings
    assert (model.lm_head.weight is model.tok_embed.weight) == tied


def test_state_dict_has_the_local_names(checkpoint):
    tensors = streamload.load_state_dict(checkpoint.folder)
    expected = checkpoint.expected.state_dict()
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def test_transformers_own_model_takes_equal_names(checkpoint):
    peer = checkpoint.peer
    with streamload.empty_weights():
        mine = type(peer)(peer.config).eval()
    report = streamload.load_into(mine, checkpoint.folder)
    assert clean(report)
    again = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.equal(mine(IDS).logits, again(IDS).logits)


def test_rotary_tables_of_transformers_stay_float32(checkpoints):
    saved = checkpoints("llama3")
    with streamload.empty_weights():
        mine = LlamaForCausalLM(saved.peer.config)
    streamload.load_into(mine, saved.folder, dtype=torch.bfloat16)
    assert mine.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(mine.model.rotary_emb.inv_freq, saved.peer.model.rotary_emb.inv_freq)
    assert mine.lm_head.weight.dtype == torch.bfloat16


def test_sharded_checkpoints(checkpoints, tmp_path):
    saved = checkpoints("qwen2")
    saved.peer.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    check_same_values(streamload.load(tmp_path).model, saved.expected)


def test_published_names_are_those_of_the_file(checkpoint):
    name_map = streamload.mapping_for(
        checkpoint.peer.config.model_type,
        json.loads((checkpoint.folder / "config.json").read_text()),
    )
    stored = load_file(checkpoint.folder / "model.safetensors")
    published = {
        template.fill(layer=layer)
        for rule, layer in name_map.expand()
        if not rule.ignores
        for template in rule.source_templates
    }
    written = {name.removeprefix("transformer.") for name in stored}
    assert written <= published
    assert published - written <= {"lm_head.weight"}
