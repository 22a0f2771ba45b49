"""Each table against the model it fills, at published sizes and without a byte of weights."""

import pytest
import torch
from safetensors.torch import save_file

import streamload
from streamload import Rule
from streamload.core.options import Settings
from streamload.core.specs import Catalog, TensorSpec
from streamload.mapping.tables import registry
from streamload.mapping.tables.registry import build_model, known_model_types, mappings_for
from streamload.module.targets import targets_of
from streamload.planning.build import build_plan
from tests.families.architectures import ARCHITECTURES

MODELS = {name: c for row in ARCHITECTURES.values() for name, c in row.published.items()}
RANKS = 2


def case(name):
    kind = name.partition("-")[0]
    config = {"model_type": kind, **MODELS[name]}
    with streamload.empty_weights():
        model = build_model(kind, config)
    return kind, config, model


def stored_by(name_map, targets):
    """What a file of this table holds, with the shapes that the model's lead back to."""
    specs = {}
    for rule, layer in name_map.expand():
        if rule.ignores or (rule.optional and rule.sources == ("lm_head.weight",)):
            continue
        shapes = [targets[t.fill(layer=layer)].shape for t in rule.target_templates]
        if rule.by_rank:
            (source,) = rule.source_templates
            dim = getattr(rule.transform, "dim", None)
            part = tuple(n // RANKS if at == dim else n for at, n in enumerate(shapes[0]))
            found = {source.fill(layer=layer, rank=rank): part for rank in range(RANKS)}
        else:
            names = [source.fill(layer=layer) for source in rule.source_templates]
            found = dict(zip(names, rule.transform.source_shapes(shapes), strict=True))
        assert not specs.keys() & found.keys()
        specs.update({n: TensorSpec(n, "F16", shape, "file") for n, shape in found.items()})
    return Catalog(specs)


@pytest.mark.parametrize("name", MODELS)
def test_every_table_fills_its_whole_model(name):
    kind, config, model = case(name)
    targets = targets_of(model)
    tables = mappings_for(kind, config)
    counts = {"llama": 3, "mistral": 3, "qwen2": 2, "qwen3": 2, "gpt_neox": 2}
    assert len(tables) == counts.get(kind, 1)
    assert tables[0] == streamload.mapping_for(kind, config)
    for table in tables:
        if "biases" in name and "tok_embeddings.weight" in table.rules[0].sources:
            continue  # Meta's files have none
        made = build_plan(stored_by(table, targets), table, targets, Settings())
        assert made.problems == ()
        filled = {n for t in made.tensors for n in (t.name, *t.aliases)}
        assert filled == set(targets)


@pytest.mark.parametrize("kind", known_model_types())
def test_no_stored_name_matches_two_rules(kind):
    config = {"num_attention_heads": 4, "num_hidden_layers": 3, "hidden_size": 8}
    for table in mappings_for(kind, config):
        for rule, layer in table.expand():
            for template in rule.source_templates:
                source = template.fill(layer=layer, rank=0)
                found = table.find(source, rule.ndim if rule.ndim is not None else 2)
                assert [match[0] for match in found] == [rule]


def test_every_model_has_a_table_and_every_architecture_its_tests():
    assert set(known_model_types(with_model=True)) <= set(known_model_types())
    assert set(known_model_types()) == set(ARCHITECTURES)
    assert all(row.tables for row in registry.ARCHITECTURES.values())


def test_a_table_without_a_model_is_for_modules_of_ones_own(tmp_path, monkeypatch):
    row = registry.Architecture((lambda _: streamload.NameMap((Rule("h.w", "weight"),)),))
    monkeypatch.setitem(registry.ARCHITECTURES, "only-names", row)
    save_file({"h.w": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "only-names"}')
    module = torch.nn.Linear(3, 2, bias=False)
    streamload.load_into(module, tmp_path)
    assert (module.weight == 1).all()
    with pytest.raises(
        streamload.CheckpointError, match="'only-names'; streamload's own models are gpt2, "
    ):
        streamload.load(tmp_path)
    with pytest.raises(ValueError, match="'only-names' has no reference model; known: gpt2, "):
        build_model("only-names", {})


def test_a_type_without_a_table_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'mixtral'.*gpt2.*mistral"):
        streamload.mapping_for("mixtral", {})


def test_the_published_20b_has_the_tensors_of_94_files():
    _, config, model = case("gpt_neox")
    targets = targets_of(model)
    catalog = stored_by(mappings_for("gpt_neox", config)[1], targets)
    assert len(catalog) == RANKS * (1 + 44 * 12 + 2 + 1)
    assert catalog["layer_0.model_1.word_embeddings.weight"].shape == (25216, 6144)
    assert catalog["layer_45.model_0.attention.dense.weight"].shape == (6144, 3072)
    assert catalog["layer_45.model_0.attention.query_key_value.bias"].shape == (9216,)
    assert "layer_47.model_0.norm.weight" in catalog
    assert "layer_48.model_1.final_linear.weight" in catalog


@pytest.mark.parametrize(("parallel", "way"), [(True, "sum"), (False, "mean")])
def test_row_parallel_biases_follow_the_residual(parallel, way):
    config = {"num_hidden_layers": 2, "use_parallel_residual": parallel}
    table = mappings_for("gpt_neox", config)[1]
    ways = {
        rule.sources[0].partition("}.model_{rank}.")[2]: rule.transform.reduces
        for rule in table.rules
        if not rule.ignores and rule.transform.reduces
    }
    assert ways.pop("attention.dense.bias") == ways.pop("mlp.dense_4h_to_h.bias") == way
    assert set(ways.values()) == {"mean"}
    assert len(table.notices) == 1


def test_a_config_that_does_not_suffice_leaves_the_other_tables():
    (only,) = mappings_for("llama", {})
    assert only.rules[0].sources == ("model.embed_tokens.weight",)
    (only,) = mappings_for("gpt_neox", {})
    assert only.rules[0].sources == ("gpt_neox.embed_in.weight",)


def test_a_partition_that_lacks_a_tensor_is_named():
    _, config, model = case("gpt_neox-bare")
    table = mappings_for("gpt_neox", config)[1]
    targets = targets_of(model)
    lacking = "layer_3.model_1.mlp.dense_4h_to_h.bias"
    tensors = {n: s for n, s in stored_by(table, targets).items() if n != lacking}
    problems = build_plan(Catalog(tensors), table, targets, Settings()).problems
    assert any(repr(lacking) in problem for problem in problems)
