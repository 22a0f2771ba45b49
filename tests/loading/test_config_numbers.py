"""A ``config.json`` with absurd or null fields: one line that names it, and never a hang."""

from __future__ import annotations

import json
import os

import pytest
import torch

import streamload
from streamload import NameMap, Rule
from streamload.mapping.tables.registry import mapping_for, mappings_for
from streamload.models.config_fields import number, positive_int
from tests.support.tiny import bag_of, meta_gpt2, values, write, write_gpt2

HUGE = 10**400


def with_config(folder, **changes):
    write_gpt2(folder)
    text = json.dumps(json.loads((folder / "config.json").read_text()) | changes)
    # JSON's 1e999 is read as infinity.
    (folder / "config.json").write_text(text.replace('"1e999"', "1e999"))
    return folder


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "gpt2"


ABSURD = [
    ("layer_norm_epsilon", HUGE),
    ("n_layer", "1e999"),
    ("n_layer", 1e300),
    ("n_layer", 3_000_000),
    ("n_layer", 10**12),
    ("n_layer", HUGE),
    ("vocab_size", 2**63),
    ("vocab_size", 2**62),
    ("n_embd", 10**30),
    ("n_embd", 2**62),
]


@pytest.mark.parametrize(("field", "value"), ABSURD)
def test_absurd_numbers_are_refused_in_one_line(folder, field, value):
    with pytest.raises(streamload.PlanError, match=r"config\.json") as caught:
        streamload.load(with_config(folder, **{field: value}))
    text = str(caught.value)
    assert str(folder) in text
    assert "\n" not in text
    assert "C++" not in text
    assert "frame #" not in text
    assert len(text) < 400


@pytest.mark.parametrize("value", ["1e999", 1e300, 3_000_000, 10**12])
def test_absurd_layer_counts_are_refused_by_convert_and_do_not_stop_other_loads(
    folder, tmp_path, value
):
    with_config(folder, n_layer=value)
    if value != "1e999":  # infinity is no number of layers: names are kept as stored
        with pytest.raises(streamload.PlanError, match=r"config\.json: 'n_layer'.*tensors"):
            streamload.convert(folder, tmp_path / "out")
        with pytest.raises(streamload.PlanError, match=r"config\.json: 'n_layer'.*tensors"):
            streamload.load_state_dict(folder)
        assert os.listdir(tmp_path) == ["gpt2"]
        streamload.load_into(meta_gpt2(), folder)


def test_a_layer_count_with_chosen_layers(folder):
    with pytest.raises(streamload.PlanError, match=r"config\.json: 'n_layer' is 10{12}"):
        streamload.load(with_config(folder, n_layer=10**12), layers=[0])


def test_expected_layers_may_be_any_number(folder):
    with pytest.raises(streamload.PlanError, match="expected_layers=10"):
        streamload.load_into(meta_gpt2(), write_gpt2(folder), expected_layers=10**12)


def test_a_table_of_absurdly_many_layers(tmp_path):
    table = NameMap((Rule("h.{layer}.w", "b.{layer}.w"),), layers=10**12)
    path = write(tmp_path / "x.safetensors", {"h.0.w": torch.zeros(2)})
    with pytest.raises(streamload.PlanError, match="the table's layers= is 10"):
        streamload.load_state_dict(path, mapping=table)
    module = bag_of({"b.0.w": values(1, 2)}, device="cpu")
    with pytest.raises(streamload.PlanError, match="the table's layers= is 10"):
        streamload.export(module, tmp_path / "o.safetensors", mapping=table)


@pytest.mark.parametrize("field", ["n_layer", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1.5, "x", True, -1, [1]])
def test_tables_refuse_what_is_no_number(field, value):
    model_type = "gpt2" if field == "n_layer" else "llama"
    config = {"hidden_size": 8, "num_attention_heads": 2, field: value}
    with pytest.raises(ValueError, match=field):
        mapping_for(model_type, config)
    assert mappings_for(model_type, config) == ()


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "llama", "qwen3"])
def test_null_is_the_default(model_type):
    fields = ("tie_word_embeddings", "attention_bias", "use_parallel_residual", "mlp_bias")
    known = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    config = known | dict.fromkeys(fields)
    assert mappings_for(model_type, config) == mappings_for(model_type, known)


def test_a_tie_that_is_null_loads_and_converts(folder, tmp_path):
    with_config(folder, tie_word_embeddings=None)
    model = streamload.load(folder).model
    assert model.lm_head.weight is model.tok_embed.weight
    streamload.convert(folder, tmp_path / "local", names="local")
    again = streamload.load(tmp_path / "local").model
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_fields_of_any_size():
    with pytest.raises(ValueError, match="'eps' must be a finite number"):
        number({"eps": HUGE}, "eps")
    with pytest.raises(ValueError, match="'n' must be below"):
        positive_int({"n": 2**63}, "n", 1)
    assert positive_int({"n": 2**63 - 1}, "n", 1) == 2**63 - 1
