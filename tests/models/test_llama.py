import pytest
import torch
from transformers import LlamaConfig as PeerLlama
from transformers import MistralConfig, Qwen2Config, Qwen3Config

from streamload.mapping.tables.registry import build_model
from streamload.models.llama_model import Llama, LlamaConfig
from streamload.module.empty_weights import empty_weights
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
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama": PeerLlama(**TINY),
    "llama-old": PeerLlama(**TINY | {"num_key_value_heads": 4}, rms_norm_eps=1e-5),
    "one-kv-head": PeerLlama(**TINY | {"num_key_value_heads": 1}, rope_theta=500000.0),
    "biases": PeerLlama(**TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama3": PeerLlama(**TINY, rope_parameters=LLAMA3 | {"rope_theta": 500.0}),
    "linear": PeerLlama(**TINY, rope_scaling={"rope_type": "linear", "factor": 3.0}),
    "dynamic": PeerLlama(**TINY, rope_scaling={"rope_type": "dynamic", "factor": 3.0}),
    "yarn": PeerLlama(**TINY, rope_parameters=YARN | {"rope_theta": 100.0}),
    "yarn-mscale": PeerLlama(
        **TINY,
        rope_parameters=YARN
        | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8.0, "truncate": False},
    ),
    "yarn-attention-factor": Qwen2Config(**TINY, rope_scaling=YARN | {"attention_factor": 1.2}),
    "mistral": MistralConfig(**TINY, sliding_window=4, head_dim=12),
    "mistral-no-window": MistralConfig(**TINY, sliding_window=None),
    "qwen2": Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**TINY, head_dim=24),
    "qwen3-layers": Qwen3Config(
        **TINY,
        head_dim=8,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_agrees_with_transformers(config):
    peer, ours = build_pair(config)
    check_agrees(peer, ours)
    check_config_round_trip(config, ours)


def test_names_and_shapes():
    model = build_model("qwen3", TINY | {"head_dim": 12})
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    block = {
        "ln1.scale": (32,),
        "attn.q.weight": (48, 32),
        "attn.k.weight": (24, 32),
        "attn.v.weight": (24, 32),
        "attn.q_norm.scale": (12,),
        "attn.k_norm.scale": (12,),
        "attn.out_proj.weight": (32, 48),
        "ln2.scale": (32,),
        "mlp.gate.weight": (48, 32),
        "mlp.up.weight": (48, 32),
        "mlp.down.weight": (32, 48),
    }
    expected = {"tok_embed.weight": (97, 32)}
    for n in range(3):
        expected |= {f"blocks.{n}.{name}": shape for name, shape in block.items()}
    expected |= {"final_ln.scale": (32,), "lm_head.weight": (97, 32)}
    assert shapes == expected
    assert list(model.buffers()) == []


def test_qwen2_biases_are_on_queries_keys_and_values_only():
    model = build_model("qwen2", TINY)
    assert {n.split(".", 2)[2] for n, _ in model.named_parameters() if n.endswith("bias")} == {
        *(f"attn.{part}.bias" for part in "qkv")
    }


def test_old_and_new_forms_of_the_rotary_fields_are_one():
    old = TINY | {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = TINY | {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
    }
    assert LlamaConfig.from_dict(old) == LlamaConfig.from_dict(new)


def test_defaults_of_absent_and_null_fields():
    short = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    config = LlamaConfig.from_dict(short | {"head_dim": None, "rope_scaling": None})
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert config.rope.theta == 10000.0
    assert LlamaConfig.from_dict(TINY | {"model_type": "qwen3"}).head_dim == 128
    mistral = TINY | {"model_type": "mistral"}
    assert LlamaConfig.from_dict(mistral).windows == (4096,) * 3
    assert LlamaConfig.from_dict(mistral | {"sliding_window": None}).windows == (None,) * 3
    qwen = TINY | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}
    assert LlamaConfig.from_dict(qwen).windows == (None,) * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "by layer type"),
        ({"rope_scaling": 4}, "'rope_scaling'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_size": 33}, "hidden_size 33"),
        ({"model_type": "mixtral"}, "'mixtral'"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "'layer_types'"),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 3}, "'linear_attention'"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
    ],
)
def test_a_bad_field_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_dict(TINY | changes)


def test_prompt_far_beyond_the_window_and_decoding_there():
    peer, ours = build_pair(MistralConfig(**TINY, sliding_window=3))
    check_agrees(peer, ours, prompt_length=40)


@pytest.mark.parametrize("context", [empty_weights, lambda: torch.device("meta")])
def test_rotary_tables_are_right_however_the_model_was_built(context):
    with context():
        empty = Llama.from_config(TINY)
    whole = Llama.from_config(TINY).eval()
    assert all(p.is_meta for p in empty.parameters())
    empty.load_state_dict(whole.state_dict(), assign=True)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(empty.eval()(ids), whole(ids))


def test_a_cast_leaves_the_rotary_tables_exact():
    # Position 4001 is not a bfloat16 number: tables cast with the model would merge positions.
    model = Llama.from_config(TINY).to(torch.bfloat16)
    cos, _ = model._span(4001, 1).rotary(torch.zeros(1, dtype=torch.float32))
    expected = torch.cos(torch.tensor(4001.0))
    torch.testing.assert_close(cos[0, 0], expected, atol=1e-4, rtol=0)


def test_training_works_after_generation_made_the_tables():
    model = Llama.from_config(TINY)
    with torch.inference_mode():
        model(torch.arange(5)[None])
    model(torch.arange(5)[None]).logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_dynamic_frequencies_follow_the_length_as_in_transformers():
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    peer, ours = build_pair(
        PeerLlama(**TINY | {"max_position_embeddings": 16}, rope_scaling=scaling)
    )
    size = ours.tok_embed.num_embeddings
    ids = torch.randint(0, size, (1, 80), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        # Short, at the edge, beyond; shorter again but beyond; short again: as it was at first.
        for length in (5, 16, 17, 64, 40, 16, 80, 15, 16, 20):
            torch.testing.assert_close(
                ours(ids[:, :length]), peer(ids[:, :length]).logits, atol=1e-4, rtol=0
            )
