"""Options as people give them: words from elsewhere, short forms, the call that plans."""

from __future__ import annotations

import re

import pytest
import torch

import streamload
from streamload.core.options import settings_from
from tests.support.tiny import bag, gpt2_tensors, meta_gpt2, same_bits, write_gpt2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_gpt2(tmp_path_factory.mktemp("gpt2"))


CALLS = {
    "load": lambda path, **options: streamload.load(path, **options),
    "load_into": lambda path, **options: streamload.load_into(meta_gpt2(), path, **options),
    "load_state_dict": lambda path, **options: streamload.load_state_dict(path, **options),
    "load_transformers": lambda path, **options: streamload.load_transformers(path, **options),
    "plan": lambda path, **options: streamload.plan(path, **options),
    "iter_tensors": lambda path, **options: list(streamload.iter_tensors(path, **options)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("torch_dtype", "it is called dtype here"),
        ("device_map", "it is called device here"),
        ("low_cpu_mem_usage", "leave it out"),
        ("max_memory", "check_memory"),
        ("trust_remote_code", "no code"),
        ("load_in_8bit", "quantize='int8'"),
        ("map_location", "it is called device here"),
        ("dtpye", "did you mean 'dtype'?"),
        ("chunk_byte", "did you mean 'chunk_bytes'?"),
    ],
)
def test_what_is_called_otherwise_is_told(folder, call, given, answer):
    with pytest.raises(TypeError, match=re.escape(answer)) as info:
        call(folder, **{given: True})
    assert repr(given) in str(info.value)
    assert "\n" not in str(info.value)


def test_all_unknown_options_are_told_at_once(folder):
    with pytest.raises(TypeError, match=r"options 'nonsense'; 'torch_dtype': it is called dtype"):
        streamload.load(folder, torch_dtype="bf16", nonsense=1)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("mode", "mapp", "mode must be 'auto', 'stream', 'map' or None, not 'mapp'; did you mean"),
        ("layout", 3, "layout must be 'contiguous', 'stored' or None, not 3"),
        ("ties", None, "ties must be 'refuse' or 'keep', not None"),
        ("quantize", ["int8"], r"quantize must be 'int8' or None, not \['int8'\]"),
    ],
)
def test_a_wrong_choice_lists_the_right_ones(option, value, message):
    with pytest.raises(ValueError, match=message):
        settings_from({option: value})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("strict", "no", "strict must be True or False, not 'no'"),
        ("check_memory", "false", "check_memory must be True or False"),
        ("cache", "", "cache must be True or False"),
        ("download", "no", "download must be True or False"),
        ("prefix", 3, "prefix must be the start of names, not 3"),
        ("device", True, "device must be a name"),
    ],
)
def test_a_wrong_type_is_told(option, value, message):
    with pytest.raises(TypeError, match=message):
        settings_from({option: value})


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", "BF16", torch.bfloat16])
def test_a_dtype_goes_by_many_names(folder, name):
    assert streamload.load(folder, dtype=name).report.dtype == "bfloat16"


def test_dtype_auto_is_the_files_own(folder):
    loaded = streamload.load(folder, dtype="auto")
    assert same_bits(loaded.model.tok_embed.weight, gpt2_tensors()["wte.weight"])


@pytest.mark.parametrize(
    ("has_cuda", "has_mps", "expected"),
    [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_device_auto_is_the_best_there_is(monkeypatch, has_cuda, has_mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert settings_from({"device": "auto"}).device == expected
    assert settings_from({"device": {"head": "auto"}}).device == {"head": expected}


def test_device_auto_loads(folder):
    report = streamload.load(folder, device="auto").report
    assert report.device == str(
        next(iter(streamload.load(folder, device="auto").model.parameters())).device
    )


class TestPlan:
    def test_a_path_alone_plans_load(self, folder):
        plan, report = streamload.plan(folder), streamload.load(folder).report
        assert plan.ok
        for name in ("mode", "layout", "dtype", "loaded", "tied", "ignored"):
            assert getattr(plan.report, name) == getattr(report, name), name

    @pytest.mark.parametrize("mode", [None, "stream", "map"])
    def test_each_plan_is_of_its_own_call(self, folder, mode):
        options = {} if mode is None else {"mode": mode}
        module = meta_gpt2()
        planned = streamload.plan(module, folder, **options).report
        assert planned.mode == (mode or "stream")
        assert streamload.load_into(module, folder, **options).mode == planned.mode
        assert streamload.plan(folder, **options).report.mode == (mode or "map")

    def test_by_keywords(self, folder):
        assert streamload.plan(path=folder).ok
        assert streamload.plan(module=meta_gpt2(), path=folder).ok

    @pytest.mark.parametrize(
        ("args", "options", "message"),
        [
            ((), {}, "plan needs a path"),
            (("module",), {}, "plan needs a path"),
            (("path",), {"mapping": {}}, "plan(module, path)"),
            (("path",), {"expected_layers": 2}, "plan(module, path)"),
            (("path", "module"), {}, "the module comes first"),
            (("class", "path"), {}, "is a class"),
            (("loaded", "path"), {}, ".model of what load returned"),
            (("path", "path"), {}, "must be a torch.nn.Module, not str"),
        ],
    )
    def test_what_is_no_call_is_told(self, folder, args, options, message):
        known = {"path": folder, "module": meta_gpt2(), "class": torch.nn.Linear}
        known["loaded"] = streamload.load(folder)
        given = [known[name] for name in args]
        with pytest.raises(TypeError, match=re.escape(message)):
            streamload.plan(*given, **options)
        if len(given) == 2:
            with pytest.raises(TypeError, match=re.escape(message)):
                streamload.load_into(*given, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda loaded, path: streamload.export(loaded, path), ".model of what load returned"),
        (
            lambda loaded, path: streamload.export(loaded.model, path, max_shard_size="1GB"),
            "max_shard_bytes",
        ),
        (
            lambda loaded, path: streamload.convert("x", path, torch_dtype="bf16"),
            "it is called dtype",
        ),
        (
            lambda loaded, path: streamload.open_checkpoint(path, timeout=1),
            "did you mean 'timeout_s'",
        ),
        (
            lambda loaded, path: streamload.generate(loaded, [1], max_new_tokens=1),
            ".model of what load",
        ),
        (
            lambda loaded, path: streamload.generate(loaded.model, "Hi", max_new_tokens=1),
            "tokenizer",
        ),
        (
            lambda loaded, path: streamload.generate(
                loaded.model, {"input_ids": [1]}, max_new_tokens=1
            ),
            "['input_ids']",
        ),
        (
            lambda loaded, path: streamload.generate(loaded.model, [1], max_length=3),
            "max_new_tokens",
        ),
        (lambda loaded, path: streamload.iter_tensors(path, names="a"), "like ['a']"),
        (lambda loaded, path: streamload.iter_tensors(path, layers=[0]), "load_state_dict does"),
        (lambda loaded, path: streamload.iter_tensors(path, mode="map"), "load_state_dict does"),
        (
            lambda loaded, path: streamload.load(loaded.model.state_dict()),
            "load_state_dict(tensors",
        ),
        (lambda loaded, path: streamload.load(path, device=0), "'cuda:0'"),
        (lambda loaded, path: streamload.NameMap({"a": "b"}), "made of Rules"),
        (
            lambda loaded, path: streamload.mapping_for("gpt2", (loaded.config, ())),
            "config() of a source",
        ),
    ],
)
def test_what_is_passed_by_mistake_is_answered(folder, tmp_path, call, message):
    with pytest.raises(TypeError, match=re.escape(message)) as info:
        call(streamload.load(folder), tmp_path / "out")
    assert "\n" not in str(info.value)


def test_an_open_source_is_no_path(folder):
    with (
        streamload.open_checkpoint(folder) as source,
        pytest.raises(TypeError, match="not an open source"),
    ):
        streamload.load(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu:1"}, "device 'gpu:1' is called 'cuda:1' here"),
        ({"dtype": "bfloat"}, "did you mean 'bfloat16'?"),
    ],
)
def test_a_value_of_elsewhere_is_answered(folder, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        streamload.load(folder, **options)


@pytest.mark.parametrize(
    "heads", [("generator", "discriminator"), ("model", "state_dict", "module"), ("a", "b")]
)
def test_every_state_dict_of_a_file_is_named(tmp_path, heads):
    states = {head: {"w": torch.full((2,), float(n))} for n, head in enumerate(heads)}
    torch.save({**states, "epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(streamload.StreamloadError, match="prefix=") as info:
        streamload.load_into(bag({"w": (2,)}), tmp_path / "x.pt")
    for at, head in enumerate(heads):
        assert re.search(f"prefix=['\"]{head}", str(info.value))
        module = bag({"w": (2,)})
        streamload.load_into(module, tmp_path / "x.pt", prefix=head)
        assert module.w.tolist() == [at, at]


@pytest.mark.parametrize("value", [1, "yes", []])
def test_progress_is_a_bar_or_a_function(value):
    with pytest.raises(TypeError, match="progress must be True or a function"):
        settings_from({"progress": value})
