"""Weights stored transposed: a square one among them is never loaded unturned in silence."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import streamload
from streamload import Concat, Identity, NameMap, Rule, Transpose

D = 4
SHAPES = {"c_attn": (3 * D, D), "c_proj": (D, D)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        for name, (out_size, in_size) in SHAPES.items():
            setattr(self, name, nn.Linear(in_size, out_size, bias=False))


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.wpe = nn.Embedding(D, D)
        self.h = nn.ModuleList(Block() for _ in range(layers))


class Stack(nn.Module):
    """Layers of one name, of which the second is square."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, 2 * D, bias=False), nn.Linear(D, D, bias=False)])


def saved(folder, module, *, turned=True):
    path = folder / "w.safetensors"
    tensors = {
        name: (t.t() if turned and "wpe" not in name else t).contiguous()
        for name, t in module.state_dict().items()
    }
    save_file(tensors, path)
    return path


def empty(kind):
    with streamload.empty_weights():
        return kind()


def rules(*, c_proj):
    own = (
        Rule("wpe.weight", "wpe.weight"),
        Rule("h.{layer}.c_attn.weight", "h.{layer}.c_attn.weight", Transpose()),
        Rule("h.{layer}.c_proj.weight", "h.{layer}.c_proj.weight", c_proj),
    )
    return NameMap(own, layers=2)


MAPPINGS = ["auto", {n: n for n in Model().state_dict()}, lambda n: n]


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("strict", [True, False])
def test_a_square_sibling_of_what_fits_only_transposed_is_refused(tmp_path, mapping, strict):
    path = saved(tmp_path, Model())
    module = empty(Model)
    with pytest.raises(
        streamload.PlanError, match=r"'h.0.c_proj.weight'.*square.*only transposed"
    ) as info:
        streamload.load_into(module, path, mapping=mapping, strict=strict)
    rule = "Rule('h.{layer}.c_proj.weight', 'h.{layer}.c_proj.weight', Transpose())"
    assert rule in str(info.value)
    assert all(p.is_meta for p in module.parameters())
    assert "wpe" not in "".join(p for p in info.value.report.problems if "square" in p)


@pytest.mark.parametrize("strict", [True, False])
def test_the_same_name_in_another_layer_is_a_sibling(tmp_path, strict):
    path = saved(tmp_path, Stack())
    with pytest.raises(streamload.PlanError, match=r"'layers.1.weight': square"):
        streamload.load_into(empty(Stack), path, strict=strict)


@pytest.mark.parametrize("strict", [True, False])
def test_a_table_that_turns_all_but_the_square_ones_is_refused(tmp_path, strict):
    model = Model()
    path = saved(tmp_path, model)
    forgotten = rules(c_proj=None)
    with pytest.raises(streamload.PlanError, match=r"c_proj.*square.*is transposed.*Identity\(\)"):
        streamload.load_into(empty(Model), path, mapping=forgotten, strict=strict)
    with pytest.raises(streamload.PlanError, match=r"c_proj.*square"):
        streamload.load_state_dict(path, mapping=forgotten)
    loaded = empty(Model)
    streamload.load_into(loaded, path, mapping=rules(c_proj=Transpose()), strict=strict)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_rule_that_states_the_identity_is_believed(tmp_path):
    path = saved(tmp_path, Model())
    loaded = empty(Model)
    streamload.load_into(loaded, path, mapping=rules(c_proj=Identity()))
    stored = dict(streamload.iter_tensors(path))
    assert torch.equal(loaded.h[0].c_proj.weight, stored["h.0.c_proj.weight"])
    bare = NameMap(
        (
            Rule("h.{layer}.c_attn.weight", "h.{layer}.c_attn.weight"),
            *rules(c_proj=Identity()).rules[2:],
        ),
        layers=2,
    )
    with pytest.raises(streamload.PlanError, match="square"):
        streamload.load_into(empty(Model), path, mapping=bare, strict=False)


def test_square_parts_that_are_joined_count_too(tmp_path):
    path = tmp_path / "w.safetensors"
    parts = [f"h.0.{part}.weight" for part in "qkv"]
    save_file({n: torch.rand(D, D) for n in parts} | {"h.0.up.weight": torch.rand(D, 8)}, path)
    module = nn.ModuleDict(
        {
            "h": nn.ModuleList(
                [
                    nn.ModuleDict(
                        {"qkv": nn.Linear(D, 3 * D, bias=False), "up": nn.Linear(D, 8, bias=False)}
                    )
                ]
            )
        }
    )
    table = NameMap(
        (
            Rule(tuple(p.replace("0", "{layer}") for p in parts), "h.{layer}.qkv.weight", Concat()),
            Rule("h.{layer}.up.weight", "h.{layer}.up.weight"),
        ),
        layers=1,
    )
    with pytest.raises(streamload.PlanError, match=r"'h.0.qkv.weight': square"):
        streamload.load_into(module, path, mapping=table, strict=False)


def test_a_square_one_turned_beside_what_fits_only_as_stored_is_refused(tmp_path):
    path = saved(tmp_path, Model(), turned=False)
    with pytest.raises(streamload.PlanError, match=r"c_proj.*transposed, but .*only as it is"):
        streamload.load_into(empty(Model), path, mapping=rules(c_proj=Transpose()), strict=False)


def test_a_plan_says_which_rules_would_mend_it(tmp_path):
    path = saved(tmp_path, Model())
    plan = streamload.plan(empty(Model), path)
    (line,) = [p for p in plan.problems if "exact transpose" in p]
    rule = "Rule('h.{layer}.c_attn.weight', 'h.{layer}.c_attn.weight', Transpose())"
    assert line.count(rule) == 1
    assert not plan.ok
    save_file({"a": torch.rand(2, 3), "b": torch.rand(5, 3)}, path)
    module = nn.ParameterDict({"a": torch.empty(3, 2), "b": torch.empty(5, 4)})
    assert not any("exact transpose" in p for p in streamload.plan(module, path).problems)


def test_squares_without_a_turned_sibling_load(tmp_path):
    model = Model()
    path = saved(tmp_path, model, turned=False)
    loaded = empty(Model)
    assert streamload.load_into(loaded, path).ok
    assert torch.equal(loaded.h[1].c_proj.weight, model.h[1].c_proj.weight)
