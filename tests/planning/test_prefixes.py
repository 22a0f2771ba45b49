"""One prefix that explains everything missing is named, whichever side has it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import streamload
from streamload import NameMap, Rule

NAMES = ("fc.weight", "fc.bias")


def module():
    return nn.ModuleDict({"fc": nn.Linear(3, 2)})


def saved(folder, prefix, **more):
    path = folder / "w.safetensors"
    tensors = {prefix + n: v.clone() for n, v in module().state_dict().items()}
    save_file(tensors | more, path)
    return path


MAPPINGS = ["auto", NameMap(tuple(Rule(n, n) for n in NAMES)), {n: n for n in NAMES}]


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("prefix", ["policy.", "a.b."])
def test_stored_names_under_a_prefix(tmp_path, mapping, strict, prefix):
    path = saved(tmp_path, prefix)
    said = f'prefix="{prefix[:-1]}"'
    with pytest.raises(streamload.PlanError, match=said):
        streamload.load_into(module(), path, mapping=mapping, strict=strict)
    assert streamload.load_into(module(), path, mapping=mapping, prefix=prefix[:-1]).ok


@pytest.mark.parametrize("strict", [True, False])
def test_a_part_without_the_prefix_changes_nothing(tmp_path, strict):
    wide = nn.ModuleDict({"fc": nn.Linear(3, 2), "head": nn.Linear(2, 2, bias=False)})
    path = saved(tmp_path, "policy.", **{"head.weight": torch.rand(2, 2)})
    plan = streamload.plan(wide, path, strict=strict)
    assert any('prefix="policy"' in line for line in (*plan.problems, *plan.report.notices))


@pytest.mark.parametrize("strict", [True, False])
def test_a_module_that_has_the_prefix(tmp_path, strict):
    path = saved(tmp_path, "")
    outer = nn.ModuleDict({"policy": module()})
    with pytest.raises(streamload.PlanError, match=r'prefix="policy".*lambda name'):
        streamload.load_into(outer, path, strict=strict)
    assert streamload.load_into(outer, path, mapping=lambda name: "policy." + name).ok


def test_known_wrappers_are_taken_off_either_side(tmp_path):
    path = saved(tmp_path, "module._orig_mod.")
    assert streamload.load_into(nn.ModuleDict({"model": module()}), path).ok


def test_names_that_no_prefix_explains(tmp_path):
    path = saved(tmp_path, "policy.")
    other = nn.ModuleDict({"fc": nn.Linear(3, 2), "gone": nn.Linear(2, 2)})
    assert not any("prefix=" in line for line in streamload.plan(other, path).problems)
