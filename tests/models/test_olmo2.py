import pytest
from transformers import Olmo2Config as PeerConfig

from streamload.mapping.tables.registry import build_model
from streamload.models.olmo2_model import Olmo2Config
from tests.models.peers import build_pair, check_agrees, check_config_round_trip

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "grouped": PeerConfig(**TINY),
    "a-key-for-each-query": PeerConfig(**TINY | {"num_key_value_heads": None}),
    "biases-tied": PeerConfig(**TINY, attention_bias=True, tie_word_embeddings=True),
    "eps-theta": PeerConfig(
        **TINY,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "yarn": PeerConfig(**TINY, rope_parameters=YARN | {"rope_theta": 100.0}),
}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_agrees_with_transformers(config):
    peer, ours = build_pair(config)
    check_agrees(peer, ours)
    check_config_round_trip(config, ours)


def test_names_and_shapes():
    model = build_model("olmo2", TINY)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    block = {
        "ln1.scale": (32,),
        "attn.q.weight": (32, 32),
        "attn.k.weight": (16, 32),
        "attn.v.weight": (16, 32),
        "attn.q_norm.scale": (32,),
        "attn.k_norm.scale": (16,),
        "attn.out_proj.weight": (32, 32),
        "ln2.scale": (32,),
        "mlp.gate.weight": (48, 32),
        "mlp.up.weight": (48, 32),
        "mlp.down.weight": (32, 48),
    }
    expected = {"tok_embed.weight": (97, 32)}
    for n in range(3):
        expected |= {f"blocks.{n}.{name}": shape for name, shape in block.items()}
    assert shapes == expected | {"final_ln.scale": (32,), "lm_head.weight": (97, 32)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"hidden_size": 33}, "hidden_size 33"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"attention_bias": 1}, "'attention_bias'"),
    ],
)
def test_a_bad_field_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        Olmo2Config.from_dict(TINY | changes)
