"""What is no adapter of this base is refused by name; the module stays as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

import streamload
from streamload.adapters.settings import AdapterSettings, settings_from_config
from streamload.cli import main
from streamload.core.errors import CheckpointError, PlanError
from tests.adapters.judge import hand_made, pair
from tests.support.tiny import bag, refused, write

Q, K = "layers.0.q", "layers.1.q"
SHAPES: dict[str, tuple[int, ...]] = {
    f"{Q}.weight": (6, 4),
    f"{K}.weight": (6, 4),
    f"{K}.bias": (6,),
    "norm.weight": (4,),
    "emb.weight": (10, 4),
    "ids": (6, 4),
}
TOKENS = "emb.token_adapter.trainable_tokens_delta"


@pytest.fixture
def base(tmp_path) -> str:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    tensors["ids"] = torch.zeros(6, 4, dtype=torch.int64)
    return write(tmp_path / "model.safetensors", tensors)


def without(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors.items() if part not in name}


# What the adapter holds, its configuration, and words of the refusal.
WRONG: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], tuple[str, ...]]] = {
    "LoHa": (pair(Q, 6, 4), {"peft_type": "LOHA"}, ("LOHA", "LORA")),
    "IA3": ({f"{Q}.ia3_l": torch.ones(6, 1)}, {"peft_type": "IA3"}, ("IA3",)),
    "a prompt": ({"prompt_embeddings": torch.ones(2, 4)}, {"peft_type": "P_TUNING"}, ("P_TUNING",)),
    "no kind": (pair(Q, 6, 4), {"peft_type": None}, ("without peft_type",)),
    "QA-LoRA": (pair(Q, 6, 4), {"use_qalora": True}, ("use_qalora",)),
    "PiSSA": (pair(Q, 6, 4), {"init_lora_weights": "pissa_niter_4"}, ("pissa_niter_4", "initial")),
    "repeated layers": (pair(Q, 6, 4), {"layer_replication": [[0, 2]]}, ("layer_replication",)),
    "another base": (pair("blocks.7.w", 6, 4), {}, ("another base", "blocks.7.w.lora_A")),
    "other shapes": (pair(Q, 6, 5), {}, ("[2, 5]", "[6, 2]", "[6, 4]", Q)),
    "turned": (pair("emb", 10, 4) | pair(Q, 3, 8), {}, (f"{Q}.lora_A", "[6, 4]")),
    "a vector": (pair("norm", 4, 4), {}, ("norm.weight", "[4]")),
    "integers": (pair("ids", 6, 4), {}, ("ids",)),
    "no B": (without(pair(Q, 6, 4), "lora_B"), {}, ("no lora_B", Q)),
    "no A": (without(pair(Q, 6, 4), "lora_A"), {}, ("no lora_A", Q)),
    "no common rank": (
        {f"{Q}.lora_A.weight": torch.ones(2, 4), f"{Q}.lora_B.weight": torch.ones(6, 3)},
        {},
        ("[2, 4]", "[6, 3]", "no rank in common"),
    ),
    "a layer left out": (
        pair(Q, 6, 4),
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        (f"{Q}.lora_A", "layers_to_transform"),
    ),
    "another rank": (pair(Q, 6, 4, 3), {}, ("has rank 3", "says 2")),
    "another rank by pattern": (pair(Q, 6, 4), {"rank_pattern": {"q": 3}}, ("rank 2", "says 3")),
    "empty": ({}, {}, ("no tensors",)),
    "one tensor too many": (
        pair(Q, 6, 4) | {"norm2.weight": torch.ones(4)},
        {},
        ("norm2.weight", "for no tensor"),
    ),
    "a part that nothing knows": (
        pair(Q, 6, 4) | {f"{Q}.lora_diag": torch.ones(2)},
        {},
        ("lora_diag",),
    ),
    "the same twice": (
        pair(Q, 6, 4) | {f"{Q}.lora_A.default.weight": torch.ones(2, 4)},
        {},
        ("says the same", Q),
    ),
    "a whole tensor of another shape": (
        pair(Q, 6, 4) | {"norm.weight": torch.ones(5)},
        {"modules_to_save": ["norm"]},
        ("norm.weight", "[5]", "[4]"),
    ),
    "DoRA without magnitudes": (pair(Q, 6, 4), {"use_dora": True}, ("no lora_magnitude_vector",)),
    "magnitudes without DoRA": (
        pair(Q, 6, 4) | {f"{Q}.lora_magnitude_vector": torch.ones(6)},
        {},
        ("a lora_magnitude_vector", "use_dora is False"),
    ),
    "magnitudes of others": (
        pair(Q, 6, 4) | {f"{Q}.lora_magnitude_vector": torch.ones(4)},
        {"use_dora": True},
        ("lora_magnitude_vector", "[4]", "6 outputs"),
    ),
    "a bias without a base": (
        pair(Q, 6, 4) | {f"{Q}.lora_B.bias": torch.ones(6)},
        {"lora_bias": True},
        ("lora_B.bias", "no bias of the base"),
    ),
    "a bias of A": (
        pair(K, 6, 4) | {f"{K}.lora_A.bias": torch.ones(2)},
        {},
        ("a bias of lora_A",),
    ),
    "rows without indices": ({TOKENS: torch.ones(2, 4)}, {}, (TOKENS, "0 rows")),
    "rows that are not there": (
        {TOKENS: torch.ones(2, 4)},
        {"trainable_token_indices": [1, 10]},
        (TOKENS, "[10, 4]"),
    ),
    "parameters of nothing": (
        pair("mlp.experts", 6, 4),
        {"target_parameters": ["experts.gate_up_proj"]},
        ("mlp.experts.lora_A", "for no tensor"),
    ),
    "integers of an adapter": (
        pair(Q, 6, 4) | {f"{Q}.lora_A.weight": torch.ones(2, 4, dtype=torch.int8)},
        {},
        ("int8", f"{Q}.lora_A"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what, base, tmp_path):
    tensors, config, words = WRONG[what]
    adapter = hand_made(tmp_path / "adapter", tensors, **config)
    module = bag(SHAPES)
    with refused(adapter, module, streamload.CheckpointError) as caught:
        streamload.load_into(module, base, adapter=adapter, strict=False)
    assert all(word in str(caught[0]) for word in words), str(caught[0])
    with refused(adapter, kind=streamload.CheckpointError):
        streamload.convert(base, tmp_path / "new", adapter=adapter)
    assert not (tmp_path / "new").exists()


def test_all_that_is_wrong_is_listed(base, tmp_path):
    tensors = pair(Q, 6, 5) | pair("blocks.1.w", 6, 4) | pair(K, 6, 4, 3)
    adapter = hand_made(tmp_path / "adapter", tensors)
    with pytest.raises(streamload.CheckpointError) as info:
        streamload.load_state_dict(base, adapter=adapter)
    assert len([p for p in info.value.problems if "lora_A" in p]) == 3


@pytest.mark.parametrize(
    "config",
    [
        {"r": 0}, {"r": True}, {"r": 2.5}, {"r": "2"}, {"lora_alpha": "4"}, {"lora_alpha": None},
        {"lora_alpha": 1e308}, {"lora_alpha": 10**400},
        {"rank_pattern": ["q"]}, {"rank_pattern": {"q": -1}}, {"alpha_pattern": {"q": [1]}},
        {"rank_pattern": {"(q": 2}}, {"rank_pattern": {"(.*)*x": 2}}, {"bias": "some"},
        {"rank_pattern": {".*.*.*.*x": 2}}, {"alpha_pattern": {r"(q)\1": 2}}, {"use_rslora": "yes"},
        {"modules_to_save": "norm"}, {"target_parameters": [1]}, {"use_dora": 1},
        {"trainable_token_indices": [-1]}, {"trainable_token_indices": {"emb": 3}},
    ],
    ids=repr,
)  # fmt: skip
def test_a_configuration_that_peft_does_not_write(config, base, tmp_path):
    adapter = hand_made(tmp_path / "adapter", pair(Q, 6, 4), **config)
    with refused(adapter / "adapter_config.json", kind=streamload.CheckpointError):
        streamload.load_state_dict(base, adapter=adapter)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"r": NaN}', b"\xff", b'{"peft_type": "LORA"'])
def test_a_configuration_that_is_none(text, base, tmp_path):
    adapter = hand_made(tmp_path / "adapter", pair(Q, 6, 4))
    (adapter / "adapter_config.json").write_bytes(text)
    with refused(adapter / "adapter_config.json", kind=streamload.CheckpointError):
        streamload.load_state_dict(base, adapter=adapter)


def test_what_is_no_adapter_at_all(base, tmp_path):
    # A name that is mistyped is never the folder's own adapter.
    beside = hand_made(tmp_path / "beside", pair(Q, 6, 4))
    with refused(beside / "nothing", kind=streamload.CheckpointNotFoundError):
        streamload.load_state_dict(base, adapter=beside / "nothing")
    for path in (tmp_path, Path(base)):
        with refused(path, kind=streamload.CheckpointNotFoundError) as caught:
            streamload.load_state_dict(base, adapter=path)
        assert "adapter_config.json" in str(caught[0])
    adapter = hand_made(tmp_path / "adapter", pair(Q, 6, 4))
    weights = adapter / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    with refused(weights, kind=streamload.CheckpointError):
        streamload.load_state_dict(base, adapter=adapter)
    weights.unlink()
    with refused(adapter, kind=streamload.CheckpointNotFoundError) as caught:
        streamload.load_state_dict(base, adapter=adapter)
    assert "adapter_model" in str(caught[0])


def test_several_places_for_a_name(tmp_path):
    names = [f"{tower}.layers.0.q.weight" for tower in ("vision", "text")]
    base = write(tmp_path / "model.safetensors", {name: torch.zeros(6, 4) for name in names})
    adapter = hand_made(tmp_path / "adapter", pair(Q, 6, 4))
    with refused(adapter, kind=streamload.CheckpointError) as caught:
        streamload.load_state_dict(base, adapter=adapter)
    assert all(name in str(caught[0]) for name in names)


def test_wrong_arguments(base):
    for wrong in (3, {"a": 1}, [3]):
        with pytest.raises(TypeError):
            streamload.load_state_dict(base, adapter=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="load_state_dict"):
        streamload.iter_tensors(base, adapter="somewhere")


def test_the_command_says_it_in_one_line(base, tmp_path):
    adapter = hand_made(tmp_path / "adapter", pair("blocks.7.w", 6, 4))
    for command in (["plan", base], ["load", base], ["convert", base, str(tmp_path / "new")]):
        result = CliRunner().invoke(main, [*command, "--adapter", str(adapter)])
        assert result.exit_code == 1
        assert len(result.stderr.strip().splitlines()) == 1
        assert "blocks.7.w" in result.stderr


def test_an_adapter_that_is_cut_meanwhile(base, tmp_path, monkeypatch):
    adapter = hand_made(tmp_path / "adapter", pair(Q, 6, 4))
    module = bag({name: shape for name, shape in SHAPES.items() if name != "ids"})
    weights = adapter / "adapter_model.safetensors"
    from streamload.loading import running

    plan = running.plan_load

    def then_cut(job: Any) -> Any:
        made = plan(job)
        weights.write_bytes(weights.read_bytes()[:-8])
        return made

    monkeypatch.setattr(running, "plan_load", then_cut)
    with refused(weights, module, streamload.ReadError):
        streamload.load_into(module, base, adapter=adapter, strict=False)


LAYERS: list[dict[str, Any]] = [
    {"layers_to_transform": 1},
    {"layers_to_transform": [0, 2]},
    {"layers_to_transform": []},
    {"layers_to_transform": [2], "layers_pattern": "h"},
    {"layers_to_transform": [2], "layers_pattern": ["blocks", "layers"]},
    {"layers_to_transform": [0], "layers_pattern": []},
    {"layers_to_transform": [1], "layers_pattern": "experts"},
]


@pytest.mark.parametrize("chosen", LAYERS, ids=str)
def test_chosen_layers_are_as_peft_has_them(chosen):
    config = LoraConfig(target_modules=["q"], **chosen)
    ours = settings_from_config({"peft_type": "LORA", "target_modules": ["q"], **chosen}, "x")
    names = ("q", "h.2.q", "a.h.2.q", "model.layers.1.q", "layers.0.q", "m.layers.2.experts.1.q")
    for name in names:
        assert ours.leaves_out(name) is not bool(check_target_module_exists(config, name)), name


@pytest.mark.parametrize(
    ("chosen", "word"),
    [
        ({"layers_to_transform": [0], "target_modules": ".*q"}, "target_modules"),
        ({"layers_pattern": "h"}, "needs layers_to_transform"),
        ({"layers_to_transform": [True]}, "layers_to_transform"),
        ({"layers_to_transform": [0], "layers_pattern": "((a+)+)+"}, "intricate"),
    ],
)
def test_chosen_layers_that_peft_does_not_write(chosen, word):
    with pytest.raises(CheckpointError, match=word):
        settings_from_config({"peft_type": "LORA", **chosen}, "x")


def test_patterns_are_as_peft_has_them():
    ranks = {r"layers\.1\..*q": 3, "q": 5, "^whole": 7}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "rank_pattern": ranks}
    found: AdapterSettings = settings_from_config(config, "")
    names = {"a.layers.1.x.q": 3, "a.layers.2.q": 5, "q": 5, "xq": 2, "q.k": 2, "whole": 7}
    assert {name: found.rank_of(name) for name in names} == names
    assert found.scale_of("a.q") == 8 / 5
    assert settings_from_config({**config, "use_rslora": True}, "").scale_of("xq") == 8 / math.sqrt(
        2
    )
    theirs = {name: ranks.get(get_pattern_key(ranks, name), 2) for name in names}
    assert theirs == names


def test_a_name_that_peft_would_not_look_at_is_refused(tmp_path):
    base, adapter = tmp_path / "base.safetensors", tmp_path / "lora"
    save_file({"a.weight": torch.ones(4, 3)}, base)
    adapter.mkdir()
    save_file({"a.weight": torch.zeros(4, 3)}, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["a"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"'a\.weight' is no tensor of an adapter"):
        streamload.load_state_dict(base, adapter=adapter)


@pytest.mark.parametrize(
    "target", ["lora", "lora/adapter_model.safetensors", "lora/new.safetensors"]
)
def test_nothing_is_merged_into_the_folder_of_an_adapter(tmp_path, target):
    base, adapter = tmp_path / "base.safetensors", tmp_path / "lora"
    save_file({"a.weight": torch.ones(4, 3)}, base)
    adapter.mkdir()
    parts = {"lora_A": torch.ones(2, 3), "lora_B": torch.ones(4, 2)}
    named = {f"base_model.model.a.{part}.weight": tensor for part, tensor in parts.items()}
    save_file(named, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["a"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    before = {path.name: path.read_bytes() for path in adapter.iterdir()}
    with pytest.raises(PlanError, match="would apply it again"):
        streamload.convert(base, tmp_path / target, adapter=adapter)
    assert {path.name: path.read_bytes() for path in adapter.iterdir()} == before
