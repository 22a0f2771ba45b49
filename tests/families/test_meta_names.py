"""Meta's original files: other names, interleaved rotary rows, ``params.json``."""

import json

import pytest
import torch
from safetensors.torch import save_file

import streamload
from streamload.core.errors import CheckpointError
from streamload.sources.config.meta_params import config_from_params
from tests.families.tiny import CONFIG, llama, write
from tests.models.peers import check_agrees

NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
PARAMS = {
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": -1,
    "multiple_of": 16,
    "ffn_dim_multiplier": 0.5,
    "norm_eps": 1e-6,
    "rope_theta": 500.0,
}


def interleave(weight, heads):
    """Half-split rows to interleaved pairs: the inverse of what a load does."""
    size = weight.shape[0] // heads
    return weight.view(heads, 2, size // 2, -1).transpose(1, 2).reshape(weight.shape)


def to_meta(tensors, heads, kv_heads):
    found = {"rope.freqs": torch.ones(4)}
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = interleave(tensor, heads if "q_proj" in name else kv_heads)
        for published, original in NAMES.items():
            name = name.replace(published + ".", original + ".")
        found[name] = tensor.clone()
    return found


@pytest.fixture
def plain(checkpoints):
    return checkpoints("plain-llama")


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
@pytest.mark.parametrize("config", ["config.json", "params.json"])
def test_consolidated_files(plain, tmp_path, ending, config):
    tensors = to_meta(plain.peer.state_dict(), 4, 2)
    if ending == "pth":
        torch.save(tensors, tmp_path / "consolidated.00.pth")
    else:
        save_file(tensors, tmp_path / "consolidated.safetensors")
    text = json.dumps(PARAMS) if config == "params.json" else None
    (tmp_path / config).write_text(text or (plain.folder / "config.json").read_text())
    loaded = streamload.load(tmp_path)
    assert loaded.report.ignored == ("rope.freqs",)
    assert loaded.report.summary().endswith("missing=0 unexpected=0 shape_mismatch=0")
    assert all(
        torch.equal(tensor, plain.expected.state_dict()[name])
        for name, tensor in loaded.model.state_dict().items()
    )
    check_agrees(plain.peer, loaded.model)
    assert (config == "params.json") == any("params.json" in n for n in loaded.report.notices)


def test_they_are_exported_under_published_names(plain, tmp_path):
    save_file(to_meta(plain.peer.state_dict(), 4, 2), tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    streamload.export(streamload.load(tmp_path).model, tmp_path / "out")
    again = streamload.load_state_dict(tmp_path / "out")
    expected = plain.expected.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())


def test_rope_freqs_beside_published_names_are_ignored(tmp_path):
    write(tmp_path, llama() | {"rope.freqs": torch.ones(4)}, **CONFIG)
    assert streamload.load(tmp_path).report.ignored == ("rope.freqs",)


@pytest.mark.parametrize(
    ("params", "size"),
    [
        ({"dim": 4096, "multiple_of": 256}, 11008),  # LLaMA 7B
        ({"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28672),  # 2 and 3, 70B
        ({"dim": 4096, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 14336),  # 3, 8B
        ({"dim": 2048, "multiple_of": 256, "ffn_dim_multiplier": 1.5}, 8192),  # 3.2, 1B
        ({"dim": 4096, "hidden_dim": 14336}, 14336),  # Mistral 7B
    ],
)
def test_feed_forward_sizes_of_published_models(params, size):
    given = {"n_layers": 1, "n_heads": 32, "vocab_size": 10, **params}
    assert config_from_params(given, {})[0]["intermediate_size"] == size


@pytest.mark.parametrize(("width", "factor"), [(2048, 32.0), (4096, 8.0)])
def test_a_scaling_without_a_factor_is_told(width, factor):
    given = {"dim": width, "n_layers": 1, "n_heads": 32, "vocab_size": 10}
    config, notices = config_from_params(given | {"use_scaled_rope": True}, {})
    assert config["rope_scaling"]["factor"] == factor
    assert str(factor) in notices[1]
    given |= {"use_scaled_rope": True, "rope_scaling_factor": 4}
    config, notices = config_from_params(given, {})
    assert config["rope_scaling"]["factor"] == 4.0
    assert len(notices) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moe": {"num_experts": 8}}, "moe"),
        ({"dim": None}, "'dim'"),
        ({"n_heads": 2.5}, "'n_heads'"),
    ],
)
def test_params_that_cannot_be_followed_are_refused(tmp_path, change, words):
    write(tmp_path, llama())
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | change))
    with pytest.raises(CheckpointError, match=rf"params\.json.*{words}"):
        streamload.load(tmp_path)
