import pytest
from transformers import GPTNeoXConfig

from streamload.mapping.tables.registry import build_model
from streamload.models.neox_model import NeoXConfig
from tests.models.peers import build_pair, check_agrees, check_config_round_trip

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5, "rope_theta": 99.0}


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rotary_pct": 1.0, "rotary_emb_base": 500.0, "hidden_act": "gelu_new"},
        {"rope_parameters": LINEAR, "hidden_act": "gelu_fast", "attention_bias": False},
        {"tie_word_embeddings": True, "layer_norm_eps": 1e-3},
    ],
    ids=str,
)
def test_agrees_with_transformers(changes, parallel):
    config = GPTNeoXConfig(**TINY, use_parallel_residual=parallel, **changes)
    peer, ours = build_pair(config)
    check_agrees(peer, ours)
    check_config_round_trip(config, ours)


def test_names_and_shapes():
    model = build_model("gpt_neox", TINY)
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
        "mlp.fc1.weight": (48, 32),
        "mlp.fc1.bias": (48,),
        "mlp.fc2.weight": (32, 48),
        "mlp.fc2.bias": (32,),
    }
    expected = {"tok_embed.weight": (97, 32)}
    for n in range(3):
        expected |= {f"blocks.{n}.{name}": shape for name, shape in block.items()}
    expected |= {"final_ln.scale": (32,), "final_ln.shift": (32,), "lm_head.weight": (97, 32)}
    assert shapes == expected
    assert model.lm_head.weight is not model.tok_embed.weight


def test_defaults_are_the_published_20b():
    config = NeoXConfig.from_dict({})
    assert config == NeoXConfig()
    assert (config.head_size, config.rope.rotary_size(config.head_size)) == (96, 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu_quick"}, "'gelu_quick'"),
        ({"num_attention_heads": 3}, "num_attention_heads 3"),
        ({"rotary_pct": 0.05}, "rotary_pct 0.05"),
        ({"rotary_pct": 1.5}, "rotary_pct 1.5"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"use_parallel_residual": 1}, "'use_parallel_residual'"),
    ],
)
def test_a_bad_field_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        NeoXConfig.from_dict(TINY | changes)
