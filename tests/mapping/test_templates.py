"""Whole-segment templates: what matches, what fills, what is malformed."""

import pytest

from streamload.mapping.common import layer_of
from streamload.mapping.rules import NameMap, Rule, strip_wrappers
from streamload.mapping.templates import Template, name_key

MATCHES = [
    ("wte.weight", "wte.weight", {}),
    ("h.{layer}.ln.weight", "h.0.ln.weight", {"layer": 0}),
    ("h.{layer}.ln.weight", "h.10.ln.weight", {"layer": 10}),
    ("h.{layer}.ln.weight", "h.01.ln.weight", None),
    ("h.{layer}.ln.weight", "h..ln.weight", None),
    ("h.{layer}.ln.weight", "h.-1.ln.weight", None),
    ("h.{layer}.ln.weight", "h.x.ln.weight", None),
    ("h.{layer}.ln.weight", "xh.0.ln.weight", None),
    ("h.{layer}.ln.weight", "h.0.ln.weight.scale", None),
    ("h.{layer}.attn.bias", "h.0.attn.c_attn.bias", None),
    ("h.{layer}.ln_1.weight", "h.3.ln_1.weight", {"layer": 3}),
    ("h.{layer}.ln_1.weight", "h.3.ln_2.weight", None),
    ("layer_{layer+2}.w", "layer_2.w", {"layer": 0}),
    ("layer_{layer+2}.w", "layer_1.w", None),
    ("p.{rank}.{layer}.w", "p.1.4.w", {"rank": 1, "layer": 4}),
    ("p.{layer}.{layer}.w", "p.4.4.w", {"layer": 4}),
    ("p.{layer}.{layer}.w", "p.4.5.w", None),
    ("a.{layer}.b", "a.\uff19.b", None),
]


@pytest.mark.parametrize(("template", "name", "expected"), MATCHES)
def test_matching(template, name, expected):
    compiled = Template(template)
    key, numbers = name_key(name, inside=compiled.inside)
    found = compiled.match(numbers) if key == compiled.key else None
    assert found == expected


@pytest.mark.parametrize("layer", [0, 1, 9, 10, 123])
def test_filling_is_the_way_back(layer):
    template = Template("h.{layer+2}.attn.{rank}.c_1.weight")
    name = template.fill(layer=layer, rank=3)
    assert name == f"h.{layer + 2}.attn.3.c_1.weight"
    assert template.match(name_key(name)[1]) == {"layer": layer, "rank": 3}
    assert template.has("rank")
    assert not Template("a.b").has("layer")


@pytest.mark.parametrize(
    "text", ["h.{i}.w", "h.{layer", "h.layer}.w", "h.{layer-1}.w", "{}", "{layer+x}"]
)
def test_malformed_templates_are_refused(text):
    with pytest.raises(ValueError, match="template"):
        Template(text)
    with pytest.raises(ValueError, match="template"):
        Rule(text, "w")


def test_a_template_without_its_value():
    with pytest.raises(ValueError, match="needs a layer"):
        Template("h.{layer}.w").fill()


WRAPPED = [
    ("w", "w"),
    ("module.w", "w"),
    ("module.module.w", "w"),
    ("_orig_mod.module.transformer.w", "w"),
    ("module._orig_mod.w", "w"),
    ("model.h.0._orig_mod.w", "h.0.w"),
    ("h.0._orig_mod.attn._orig_mod.w", "h.0.attn.w"),
    ("_fsdp_wrapped_module.h.0._fsdp_wrapped_module.w", "h.0.w"),
    ("h.0._checkpoint_wrapped_module.w", "h.0.w"),
    ("modules.w", "modules.w"),
    ("h.module.w", "h.module.w"),
    ("my_orig_mod.w", "my_orig_mod.w"),
    ("module", "module"),
    ("model", "model"),
]


@pytest.mark.parametrize(("name", "bare"), WRAPPED)
def test_wrappers_are_whole_parts(name, bare):
    assert strip_wrappers(name, NameMap(()).wrappers) == bare


def test_a_rule_needs_a_source():
    with pytest.raises(ValueError, match="at least one source"):
        Rule((), "w")


def test_a_rule_finds_by_number_of_dimensions():
    table = NameMap(
        (Rule("h.{layer}.attn.bias", ndim=4), Rule("h.{layer}.attn.bias", "b.{layer}", ndim=1))
    )
    assert [rule.ignores for rule, _, _ in table.find("h.2.attn.bias", 4)] == [True]
    assert [rule.ignores for rule, _, _ in table.find("transformer.h.2.attn.bias", 1)] == [False]
    assert table.find("h.2.attn.bias", 2) == []


def test_expansion_needs_the_number_of_layers():
    rules = (Rule("a", "b"), Rule("h.{layer}.a", "blocks.{layer}.b"))
    assert NameMap(rules, layers=2).target_names() == {"b", "blocks.0.b", "blocks.1.b"}
    assert NameMap(rules).target_names() == {"b"}


@pytest.mark.parametrize("part", ["²", "٣", "1" * 10, "9" * 5000])
def test_other_digits_and_endless_numbers_are_not_layers(part):
    name = f"h.{part}.w"
    table = NameMap((Rule("h.{layer}.w", "b.{layer}"),))
    assert layer_of(name) is None
    assert table.find(name, 1) == []
    with pytest.raises(ValueError, match="braces"):
        Template(f"h.{{layer+{part}}}.w")


def test_the_layer_is_the_first_number_of_a_name():
    assert layer_of("a.²b.12.c.3") == 12
    assert layer_of("h.007.w") == 7
