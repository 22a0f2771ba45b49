"""Which table a file is read by: that which places most of what it holds."""

import pytest
import torch

from streamload.mapping.choose import choose_binding
from streamload.sources.in_memory import MemorySource

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
PUBLISHED = ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"]
META = ["norm.weight", "tok_embeddings.weight", "output.weight"]
LOCAL = ["final_ln.scale", "tok_embed.weight", "lm_head.weight"]
RAW = ["layer_0.model_0.word_embeddings.weight", "layer_4.model_0.norm.weight"]
NEOX = {"model_type": "gpt_neox", "num_hidden_layers": 1}


def first_rule(names, config, targets=None, prefix=None):
    catalog = MemorySource({name: torch.zeros(1) for name in names}).catalog
    chosen, _ = choose_binding(config, catalog, targets, prefix=prefix)
    return chosen and chosen.rules[0].sources[0]


@pytest.mark.parametrize("targets", [None, dict.fromkeys(LOCAL)])
@pytest.mark.parametrize(
    ("names", "config", "expected"),
    [
        (PUBLISHED, CONFIG, "model.embed_tokens.weight"),
        (["norm.weight"], CONFIG, "model.embed_tokens.weight"),
        (META, CONFIG, "tok_embeddings.weight"),
        (RAW, NEOX, "layer_0.model_{rank}.word_embeddings.weight"),
        (LOCAL, CONFIG, None),
        (PUBLISHED, None, None),
        (PUBLISHED, {"model_type": "mixtral"}, None),
    ],
)
def test_the_table_that_places_most(names, config, expected, targets):
    assert first_rule(names, config, targets) == expected


def test_a_module_of_other_names_gets_equal_names():
    assert first_rule(PUBLISHED, CONFIG, dict.fromkeys(PUBLISHED)) is None
    assert first_rule(PUBLISHED, CONFIG, {"something.else": None}) is None


def test_names_under_the_prefix_count():
    names = [f"student.{name}" for name in META] + [f"teacher.{name}" for name in PUBLISHED]
    assert first_rule(names, CONFIG, prefix="student") == "tok_embeddings.weight"
    assert first_rule(names, CONFIG, prefix="teacher.") == "model.embed_tokens.weight"
