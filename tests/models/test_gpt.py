import json

import pytest
import torch
from transformers import GPT2Config

from streamload.models.gpt import GPT, GPTConfig
from tests.models.peers import build_pair, check_agrees, check_config_round_trip

TINY = {"vocab_size": 97, "n_positions": 64, "n_layer": 3, "n_embd": 32, "n_head": 4}
NO_IDS = {"bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_inner": 40, "layer_norm_epsilon": 1e-3},
        {"activation_function": "gelu"},
        {"activation_function": "relu"},
        {"tie_word_embeddings": False},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ],
    ids=str,
)
def test_agrees_with_transformers(changes):
    config = GPT2Config(**TINY, **NO_IDS, **changes)
    peer, ours = build_pair(config)
    check_agrees(peer, ours)
    check_config_round_trip(config, ours)


def test_names_and_shapes_are_the_lessons():
    model = GPT.from_config(TINY)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    block = {
        "ln1.scale": (32,),
        "ln1.shift": (32,),
        "attn.qkv.weight": (96, 32),
        "attn.qkv.bias": (96,),
        "attn.out_proj.weight": (32, 32),
        "attn.out_proj.bias": (32,),
        "ln2.scale": (32,),
        "ln2.shift": (32,),
        "mlp.fc1.weight": (128, 32),
        "mlp.fc1.bias": (128,),
        "mlp.fc2.weight": (32, 128),
        "mlp.fc2.bias": (32,),
    }
    expected = {"tok_embed.weight": (97, 32), "pos_embed.weight": (64, 32)}
    for n in range(3):
        expected |= {f"blocks.{n}.{name}": shape for name, shape in block.items()}
    expected |= {"final_ln.scale": (32,), "final_ln.shift": (32,)}
    assert list(shapes.items()) == list(expected.items())
    assert "lm_head.weight" in model.state_dict()
    assert list(model.buffers()) == []


def test_head_is_tied_unless_the_configuration_says_otherwise():
    tied = GPT.from_config(TINY)
    untied = GPT.from_config(TINY | {"tie_word_embeddings": False})
    assert tied.lm_head.weight is tied.tok_embed.weight
    assert untied.lm_head.weight is not untied.tok_embed.weight
    assert untied.lm_head.weight.shape == (97, 32)


def test_published_configuration_reads_as_the_small_model():
    published = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    config = GPTConfig.from_dict(published)
    assert config == GPTConfig(bos_token_id=50256, eos_token_id=50256)
    assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "quick_gelu"}, "'quick_gelu'"),
        ({"n_layer": 0}, "'n_layer'"),
        ({"n_embd": "32"}, "'n_embd'"),
        ({"n_head": 5}, "n_embd 32 is not a multiple of n_head 5"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"scale_attn_weights": "yes"}, "'scale_attn_weights'"),
        ({"layer_norm_epsilon": float("nan")}, "'layer_norm_epsilon'"),
        ({"eos_token_id": "end"}, "'eos_token_id'"),
    ],
)
def test_a_bad_field_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig.from_dict(TINY | changes)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 97]], "token id 97 is outside the vocabulary of 97"),
        ([[-1, 3]], "token id -1 "),
        ([[1] * 65], "65 positions asked for, but the model has 64"),
        ([1, 2], r"ids must be \[batch, n\]"),
        ([[]], "n of at least 1"),
    ],
)
def test_bad_ids_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        GPT.from_config(TINY)(torch.tensor(ids, dtype=torch.int64))


def test_a_cache_counts_towards_the_positions_and_the_batch():
    model = GPT.from_config(TINY).eval()
    cache = model.new_cache(1, 64)
    with torch.inference_mode():
        model(torch.ones(1, 60, dtype=torch.int64), cache)
        with pytest.raises(ValueError, match="65 positions"):
            model(torch.ones(1, 5, dtype=torch.int64), cache)
        with pytest.raises(ValueError, match="batch of 1"):
            model(torch.ones(2, 1, dtype=torch.int64), cache)
    assert cache.length == 60


def test_bfloat16_stays_bfloat16_and_close():
    model = GPT.from_config(TINY).eval()
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        full = model(ids)
        half = model.to(torch.bfloat16)(ids)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), full, atol=0.05, rtol=0)


def test_gradients_reach_every_parameter():
    model = GPT.from_config(TINY)
    model(torch.arange(9)[None]).logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
