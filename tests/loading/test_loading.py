"""``load``, ``load_state_dict``, ``plan``, ``iter_tensors``: options, memory, configuration."""

from __future__ import annotations

import json
import os

import pytest
import torch

import streamload
from streamload.loading import budget as memory_check
from streamload.system.memory import AvailableMemory
from tests.support.tiny import (
    GPT2_CONFIG,
    bag,
    bag_of,
    gpt2_tensors,
    meta_gpt2,
    open_descriptors,
    refused,
    same_bits,
    values,
    write,
    write_gpt2,
)


@pytest.fixture
def folder(tmp_path):
    return write_gpt2(tmp_path / "gpt2")


def test_load_builds_the_model_and_it_generates(folder):
    loaded = streamload.load(folder, dtype="bfloat16")
    assert not loaded.model.training
    assert loaded.config["model_type"] == "gpt2"
    assert loaded.report.summary() == "loaded=28 missing=0 unexpected=0 shape_mismatch=0"
    assert (loaded.report.model_type, loaded.report.dtype) == ("gpt2", "bfloat16")
    logits = loaded.model(torch.tensor([[1, 2, 3]]))
    assert logits.shape == (1, 3, 13)
    assert torch.isfinite(logits).all()
    assert len(list(streamload.generate(loaded.model, [1, 2], max_new_tokens=3))) == 3


def test_layers_are_renumbered_in_order(folder):
    model = streamload.load(folder, layers=[1]).model
    assert len(model.blocks) == 1
    assert same_bits(model.blocks[0].ln1.scale, gpt2_tensors()["h.1.ln_1.weight"])
    with pytest.raises(streamload.PlanError):
        streamload.load(folder, layers=[0, 5])


def test_load_into_leaves_the_other_layers_alone(folder):
    model = meta_gpt2()
    streamload.load_into(model, folder, layers=[0])
    assert model.blocks[1].ln1.scale.is_meta
    assert not model.blocks[0].ln1.scale.is_meta
    with refused(folder, model) as caught:
        streamload.load_into(model, folder, layers=[0, 7])
    assert "no block 7" in str(caught[0])


class TestStateDict:
    def test_local_names_where_there_is_a_table(self, folder):
        found = streamload.load_state_dict(folder)
        assert found["lm_head.weight"] is found["tok_embed.weight"]
        w = gpt2_tensors()["h.0.attn.c_attn.weight"]
        assert same_bits(found["blocks.0.attn.qkv.weight"], w.t().contiguous())
        model = meta_gpt2()
        model.load_state_dict(found, assign=True, strict=True)

    def test_stored_names_without_a_config(self, tmp_path):
        path = write(tmp_path / "x.safetensors", gpt2_tensors())
        assert set(streamload.load_state_dict(path)) == set(gpt2_tensors())

    def test_mappings(self, tmp_path):
        path = write(tmp_path / "x.safetensors", {"a": values(1, 2), "b": values(2, 2)})
        assert set(streamload.load_state_dict(path, mapping={"a": "x", "b": None})) == {"x"}
        with refused(path):
            streamload.load_state_dict(path, mapping={"a": "x"})
        with refused(path):
            streamload.load_state_dict(path, mapping=lambda name: "same")

    def test_missing_tensors_of_the_table(self, tmp_path):
        tensors = gpt2_tensors()
        del tensors["h.1.ln_2.bias"]
        folder = write_gpt2(tmp_path, tensors)
        with refused(folder) as caught:
            streamload.load_state_dict(folder)
        assert caught[0].report.missing == ("blocks.1.ln2.shift",)


class TestIterTensors:
    def test_the_files_order_and_values(self, folder):
        with streamload.open_checkpoint(folder) as source:
            order = list(source.catalog)
        found = list(streamload.iter_tensors(folder))
        assert [name for name, _ in found] == order
        assert all(same_bits(t, gpt2_tensors()[name]) for name, t in found)

    def test_some_names(self, folder):
        names = ["wpe.weight", "h.0.ln_1.bias"]
        assert {n for n, _ in streamload.iter_tensors(folder, names=names)} == set(names)
        assert list(streamload.iter_tensors(folder, names=[])) == []
        with refused(folder) as caught:
            streamload.iter_tensors(folder, names=["wpe.weight", "gone", "lost"])
        assert "'gone', 'lost'" in str(caught[0])

    def test_prefix_dtype_and_rules(self, tmp_path):
        tensors = {"m.w": values(1, 4), "m.inv_freq": values(2, 4), "n.w": values(3, 1)}
        path = write(tmp_path / "x.safetensors", tensors)
        found = dict(streamload.iter_tensors(path, prefix="m", dtype="bfloat16"))
        assert same_bits(found["w"], values(1, 4).bfloat16())
        assert same_bits(found["inv_freq"], values(2, 4))
        assert set(found) == {"w", "inv_freq"}

    def test_stopping_early_closes_the_file(self, folder):
        before = open_descriptors()
        steps = streamload.iter_tensors(folder)
        next(steps)
        steps.close()
        assert open_descriptors() == before

    def test_each_tensor_is_the_callers_own(self, folder):
        for _, tensor in streamload.iter_tensors(folder):
            tensor.zero_()
        assert all(
            same_bits(t, gpt2_tensors()[name]) for name, t in streamload.iter_tensors(folder)
        )

    def test_one_device_only(self, folder):
        with pytest.raises(TypeError, match="one device"):
            streamload.iter_tensors(folder, device={"": "cpu"})
        with refused(folder):
            streamload.iter_tensors(folder, device="cuda:99")


class TestPlan:
    def test_it_touches_nothing_and_says_what_a_load_would_do(self, folder):
        model = meta_gpt2()
        made = streamload.plan(model, folder, dtype="float16")
        assert made.ok
        assert made.problems == ()
        assert all(p.is_meta for p in model.parameters())
        planned = sum(t.numel() * 2 for t in gpt2_tensors().values())
        assert made.bytes_to_write == planned
        assert made.memory.needed_bytes >= planned
        assert made.memory.available_bytes > 0
        report = streamload.load_into(model, folder, dtype="float16")
        assert [e.to_dict() for e in report.loaded] == [e.to_dict() for e in made.report.loaded]

    def test_a_plan_that_does_not_hold_raises_nothing(self, folder):
        made = streamload.plan(bag_of({"x": values(1, 2)}), folder)
        assert not made.ok
        json.dumps(made.report.to_dict())


class TestMemory:
    @pytest.fixture
    def little(self, monkeypatch):
        def set_to(count, limit="cgroup"):
            monkeypatch.setattr(
                memory_check, "available_memory", lambda: AvailableMemory(count, limit)
            )

        return set_to

    def test_what_does_not_fit_is_refused_before_anything_is_allocated(
        self, tmp_path, little, monkeypatch
    ):
        path = write(tmp_path / "x.safetensors", {"w": values(1, 512, 256)})
        module = bag_of({"w": values(1, 512, 256)})
        little(400_000)
        from streamload.engine.lanes.cpu import CpuLane

        with monkeypatch.context() as patch:
            patch.setattr(CpuLane, "allocate", None)
            with refused(path, module, streamload.MemoryBudgetError) as caught:
                streamload.load_into(module, path, workers=1, chunk_bytes=1024)
        error = caught[0]
        assert (error.needed_bytes, error.available_bytes) == (512 * 256 * 4 + 1024, 400_000)
        assert error.limit == "cgroup"
        for word in ("513.0 KiB", "390.6 KiB", "bfloat16", "mode='map'", "check_memory=False"):
            assert word in str(error)
        assert not streamload.plan(module, path).memory.needed_bytes < 400_000
        options = {"workers": 1, "chunk_bytes": 1024}
        streamload.load_into(bag_of({"w": values(1, 512, 256)}), path, dtype="bfloat16", **options)
        streamload.load_into(bag_of({"w": values(1, 512, 256)}), path, mode="map", **options)
        streamload.load_into(module, path, check_memory=False, **options)

    def test_a_way_out_that_does_not_fit_is_not_offered(self, tmp_path, little):
        path = write(tmp_path / "x.safetensors", {"w": values(1, 512, 256)})
        little(1000, "machine")
        with pytest.raises(streamload.MemoryBudgetError) as info:
            streamload.load_state_dict(path)
        assert "bfloat16" not in str(info.value)
        assert info.value.limit == "machine"

    def test_overwriting_in_place_needs_the_buffers_only(self, tmp_path, little):
        path = write(tmp_path / "x.safetensors", {"w": values(1, 512, 256)})
        little(10_000)
        module = bag_of({"w": values(1, 512, 256)}, device="cpu")
        assert streamload.load_into(module, path, workers=2, chunk_bytes=1024).ok


OPTIONS_AT_FAULT = [
    ({"dtype": "float33"}, ValueError),
    ({"dtype": "int8"}, ValueError),
    ({"dtype": torch.int32}, ValueError),
    ({"dtype": "F4"}, ValueError),
    ({"mode": "stram"}, ValueError),
    ({"layout": "columns"}, ValueError),
    ({"ties": "first"}, ValueError),
    ({"overflow": "ignore"}, ValueError),
    ({"replicas": "first"}, ValueError),
    ({"quantize": "int3"}, ValueError),
    ({"workers": 0}, ValueError),
    ({"workers": -1}, ValueError),
    ({"workers": "two"}, TypeError),
    ({"workers": True}, TypeError),
    ({"chunk_bytes": 0}, ValueError),
    ({"chunk_bytes": 1.5}, TypeError),
    ({"layers": []}, ValueError),
    ({"layers": [-1]}, ValueError),
    ({"layers": [True]}, ValueError),
    ({"layers": ["0"]}, ValueError),
    ({"worker": 2}, TypeError),
]


@pytest.mark.parametrize(("options", "kind"), OPTIONS_AT_FAULT)
def test_options_at_fault_are_named_before_anything_is_opened(options, kind):
    (name,) = options
    for call in (streamload.load, streamload.load_state_dict, streamload.iter_tensors):
        with pytest.raises(kind, match=name.rstrip("s")):
            call("/no/such/path", **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", "BF16", torch.bfloat16, "torch.bfloat16"])
def test_dtypes_by_any_of_their_names(folder, dtype):
    assert streamload.load(folder, dtype=dtype).report.dtype == "bfloat16"


class TestConfig:
    def test_none_beside_the_checkpoint(self, tmp_path):
        path = write(tmp_path / "x.safetensors", {"w": values(1, 2)})
        with refused(path, kind=streamload.CheckpointError) as caught:
            streamload.load(path)
        assert "config.json" in str(caught[0])
        assert "load_into" in str(caught[0])

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "<html>", '{"a":1,"a":2}', '{"model_type":"unheard-of"}', "null", "{}"],
    )
    def test_one_that_cannot_be_used(self, folder, text):
        with open(os.path.join(folder, "config.json"), "w") as file:
            file.write(text)
        with refused(folder, kind=streamload.StreamloadError):
            streamload.load(folder)

    @pytest.mark.parametrize(
        "change",
        [
            {"n_embd": None},
            {"n_layer": "two"},
            {"n_layer": -1},
            {"n_head": 3},
            {"n_head": 0},
            {"vocab_size": 13.5},
            {"n_embd": 10**12},
            {"vocab_size": 10**30},
        ],
    )
    def test_values_that_make_no_model(self, folder, change):
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump({**GPT2_CONFIG, **change}, file)
        with refused(folder, kind=streamload.StreamloadError):
            streamload.load(folder)

    def test_a_model_of_other_sizes_than_the_file(self, folder):
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump({**GPT2_CONFIG, "vocab_size": 16, "n_layer": 3}, file)
        with refused(folder) as caught:
            streamload.load(folder)
        report = caught[0].report
        assert [m.source for m in report.shape_mismatch] == ["wte.weight"]
        assert len(report.missing) == 12
        assert report.to_dict()["ok"] is False


def test_reports_are_json_and_text(folder, tmp_path):
    report = streamload.load(folder, dtype="float16").report
    again = json.loads(json.dumps(report.to_dict()))
    assert again["ok"] is True
    entry = next(e for e in again["loaded"] if e["name"] == "blocks.0.attn.qkv.weight")
    assert entry == {
        "sources": ["h.0.attn.c_attn.weight"],
        "name": "blocks.0.attn.qkv.weight",
        "stored_dtype": "float32",
        "dtype": "float16",
        "shape": [12, 4],
        "transform": "transpose",
    }
    assert again["tied"] == [["tok_embed.weight", "lm_head.weight"]]
    assert report.to_text(verbose=True).count("→") >= 28
    path = write(tmp_path / "big.safetensors", {"w": torch.zeros(8 << 20)})
    again = streamload.load_into(bag({"w": (8 << 20,)}), path).to_dict()
    assert again["memory"]["peak_rss_bytes"] >= 31 << 20, "32 MiB were loaded"
