import pytest

from streamload.mapping.tables.chosen_layers import select_layers
from streamload.mapping.tables.registry import build_model, known_model_types
from tests.families.architectures import ARCHITECTURES

GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 8, "n_head": 2, "vocab_size": 10}
QWEN = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 10,
    "use_sliding_window": True,
    "sliding_window": 3,
    "max_window_layers": 2,
}


def test_an_unknown_type_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'mamba'.*gpt2.*gpt_neox"):
        build_model("mamba", {})
    with pytest.raises(ValueError, match="None"):
        select_layers({"n_layer": 2}, [0])
    assert set(known_model_types(with_model=True)) == set(ARCHITECTURES)


def test_the_type_given_counts():
    assert build_model("qwen2", QWEN | {"model_type": "llama"}).config.model_type == "qwen2"


@pytest.mark.parametrize("config", [GPT2, QWEN], ids=["gpt2", "qwen3"])
def test_fewer_layers(config):
    fewer = select_layers(config, range(2))
    assert len(build_model(config["model_type"], fewer).blocks) == 2
    assert config.get("layer_types") is None


def test_layers_keep_what_they_did_by_index():
    chosen = select_layers(QWEN, [1, 3])
    model = build_model("qwen3", chosen)
    assert model.config.windows == (None, 3)
    again = build_model("qwen3", select_layers(chosen, [1]))
    assert again.config.windows == (3,)


@pytest.mark.parametrize("layers", [[], [4], [-1], [0, 9]])
def test_layers_that_are_not_there_are_refused(layers):
    with pytest.raises(ValueError, match=r"at least one|blocks 0 to 3$"):
        select_layers(GPT2, layers)


def test_layers_that_depend_on_their_place_cannot_be_moved():
    config = GPT2 | {"scale_attn_by_inverse_layer_idx": True}
    assert select_layers(config, [0, 1])["n_layer"] == 2
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx"):
        select_layers(config, [1, 2])


@pytest.mark.parametrize(
    ("layers", "which"),
    [(range(100), "12-99 do"), ([0, 12], "12 does"), ([-1, 11, 13, 14, 20], "-1, 13-14, 20 do")],
)
def test_layers_that_do_not_exist_are_named(layers, which):
    with pytest.raises(ValueError, match=f"^layers {which} not exist: .* has blocks 0 to 11$"):
        select_layers({"model_type": "gpt2", "n_layer": 12}, list(layers))
