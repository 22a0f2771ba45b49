"""``convert``: values, names, ties, bounded memory, and what it refuses."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import streamload
from streamload.core.errors import CheckpointError, PlanError, WriteError
from streamload.synthesis import synthesize, synthesize_neox_raw

IDS = torch.tensor([[1, 5, 2, 7]])


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return synthesize("gpt2-tiny", tmp_path_factory.mktemp("convert") / "gpt2").path


def stored(path, **options):
    return streamload.load_state_dict(path, mapping=lambda name: name, **options)


def write(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_published_names_keep_their_bytes(gpt2, tmp_path):
    report = streamload.convert(gpt2, tmp_path / "out")
    before, after = (
        load_file(f"{gpt2}/model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    assert set(before) - set(after) == {"h.0.attn.bias", "h.1.attn.bias"}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert "2 stored buffers" in report.notices[0]
    assert report.names == "published"
    assert report.files == ("model.safetensors",)
    assert report.bytes_written == sum(t.nbytes for t in after.values())


def test_local_bfloat16_folder_is_mapped_ready_to_compute(gpt2, tmp_path):
    report = streamload.convert(gpt2, tmp_path / "out", names="local", dtype="bfloat16")
    assert "28 of 28 tensors were cast from float32 to bfloat16" in report.notices
    mapped = streamload.load(tmp_path / "out", mode="map")
    assert mapped.report.bytes_read == 0
    assert mapped.report.ok
    assert mapped.model.lm_head.weight is mapped.model.tok_embed.weight
    assert all(p.is_contiguous() for p in mapped.model.parameters())
    assert mapped.config["dtype"] == "bfloat16"
    streamed = streamload.load(gpt2, dtype="bfloat16")
    assert torch.equal(mapped.model(IDS), streamed.model(IDS))


def test_there_and_back_is_the_same_bits(gpt2, tmp_path):
    streamload.convert(gpt2, tmp_path / "local", names="local", max_shard_bytes=50_000)
    assert (tmp_path / "local" / "local.safetensors.index.json").exists()
    streamload.convert(tmp_path / "local", tmp_path / "back.safetensors")
    before, after = load_file(f"{gpt2}/model.safetensors"), load_file(tmp_path / "back.safetensors")
    assert len(after) == 28
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_tokenizer_and_config_come_along(gpt2, tmp_path):
    streamload.convert(gpt2, tmp_path / "out", dtype="float16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float16"
    assert "torch_dtype" not in config
    assert config["n_layer"] == 2
    with open(f"{gpt2}/tokenizer.json", "rb") as file:
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == file.read()


def test_wrappers_are_taken_off_published_names(gpt2, tmp_path):
    tensors = load_file(f"{gpt2}/model.safetensors")
    wrapped = {f"_orig_mod.transformer.{name}": t for name, t in tensors.items()}
    with open(f"{gpt2}/config.json", encoding="utf-8") as file:
        source = write(tmp_path / "wrapped", wrapped, json.load(file))
    streamload.convert(source, tmp_path / "out.safetensors")
    assert set(load_file(tmp_path / "out.safetensors")) == {
        name for name in tensors if not name.endswith(".attn.bias")
    }


def test_bin_source(gpt2, tmp_path):
    tensors = load_file(f"{gpt2}/model.safetensors")
    (tmp_path / "bin").mkdir()
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    with open(f"{gpt2}/config.json", "rb") as file:
        (tmp_path / "bin" / "config.json").write_bytes(file.read())
    streamload.convert(tmp_path / "bin", tmp_path / "out", names="local")
    assert torch.equal(
        load_file(tmp_path / "out" / "local.safetensors")["blocks.0.attn.qkv.weight"],
        tensors["h.0.attn.c_attn.weight"].t(),
    )


class TestTies:
    def tied(self, gpt2, folder, *, change=False, only_head=False):
        tensors = load_file(f"{gpt2}/model.safetensors")
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()
        if change:
            tensors["lm_head.weight"][3, 4] += 1
        if only_head:
            del tensors["wte.weight"]
        with open(f"{gpt2}/config.json", encoding="utf-8") as file:
            return write(folder, tensors, json.load(file))

    @pytest.mark.parametrize("names", ["published", "local"])
    def test_equal_ones_are_written_once(self, gpt2, tmp_path, names):
        source = self.tied(gpt2, tmp_path / "tied")
        report = streamload.convert(source, tmp_path / "out.safetensors", names=names)
        assert "lm_head.weight" not in load_file(tmp_path / "out.safetensors")
        assert any("'lm_head.weight' is tied" in notice for notice in report.notices)

    @pytest.mark.parametrize("bound", [None, 60_000])
    @pytest.mark.parametrize("dtype", [None, "bfloat16"])
    def test_both_names_come_back(self, gpt2, tmp_path, bound, dtype):
        """Also by way of a second conversion, whatever the number of files."""
        source = self.tied(gpt2, tmp_path / "tied")
        options = {"names": "local", "max_shard_bytes": bound}
        streamload.convert(source, tmp_path / "local", dtype=dtype, **options)
        streamload.convert(tmp_path / "local", tmp_path / "again", **options)
        assert "lm_head.weight" not in stored(tmp_path / "again")
        for local in ("local", "again"):
            streamload.convert(tmp_path / local, tmp_path / "back", max_shard_bytes=bound)
            before, back = stored(source), stored(tmp_path / "back")
            assert {name for name in before if not name.endswith(".attn.bias")} == set(back)
            wanted = getattr(torch, dtype or "float32")
            assert all(torch.equal(t, before[name].to(wanted)) for name, t in back.items())
        loaded = streamload.load(tmp_path / "back").model
        assert loaded.lm_head.weight is loaded.tok_embed.weight

    def test_one_name_comes_back_alone(self, gpt2, tmp_path):
        streamload.convert(gpt2, tmp_path / "local", names="local")
        streamload.convert(tmp_path / "local", tmp_path / "back")
        assert "lm_head.weight" not in stored(tmp_path / "back")

    @pytest.mark.parametrize("text", ["", "x", "lm_head.weight", "blocks.0.attn.qkv.weight [[[["])
    def test_a_note_of_others_changes_no_values(self, gpt2, tmp_path, text):
        streamload.convert(gpt2, tmp_path / "local", names="local")
        path = tmp_path / "local" / "local.safetensors"
        save_file(load_file(path), path, metadata={"format": "pt", "streamload_ties": text})
        streamload.convert(tmp_path / "local", tmp_path / "back")
        found, expected = stored(tmp_path / "back"), stored(gpt2)
        head = found.pop("lm_head.weight", None)
        assert (head is not None) is (text == "lm_head.weight")
        assert head is None or torch.equal(head, expected["wte.weight"])
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())

    @pytest.mark.parametrize("names", ["published", "local"])
    def test_a_lone_head_gets_the_embeddings_name(self, gpt2, tmp_path, names):
        source = self.tied(gpt2, tmp_path / "tied", only_head=True)
        streamload.convert(source, tmp_path / "out", names=names)
        first = {"published": "wte.weight", "local": "tok_embed.weight"}[names]
        found = stored(tmp_path / "out")
        assert torch.equal(found[first], stored(gpt2)["wte.weight"])
        assert "lm_head.weight" not in found

    def test_different_ones_are_refused(self, gpt2, tmp_path):
        source = self.tied(gpt2, tmp_path / "tied", change=True)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight.*wte\.weight.*tie_word"):
            streamload.convert(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_neither_is_missing(self, gpt2, tmp_path):
        tensors = load_file(f"{gpt2}/model.safetensors")
        del tensors["wte.weight"]
        with open(f"{gpt2}/config.json", encoding="utf-8") as file:
            source = write(tmp_path / "headless", tensors, json.load(file))
        with pytest.raises(PlanError, match=r"missing: 'wte\.weight' or 'lm_head\.weight'"):
            streamload.convert(source, tmp_path / "out")


class TestUnknownArchitecture:
    def test_names_are_kept_and_floats_are_cast(self, tmp_path):
        tensors = {
            "a.weight": torch.randn(3, 5),
            "a.rotary_emb.inv_freq": torch.tensor([1.0, 0.1, 0.01]),
            "steps": torch.tensor([16777217]),
            "mask": torch.tensor([True, False]),
            "big": torch.tensor([1e30, 2.0, float("inf")]),
            "empty": torch.zeros(2, 0),
            "scalar": torch.tensor(-2.5),
        }
        source = write(tmp_path / "odd", tensors, {"model_type": "odd"})
        report = streamload.convert(source, tmp_path / "out", dtype="float16")
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert set(found) == set(tensors)
        assert torch.equal(found["a.weight"], tensors["a.weight"].half())
        for name in ("a.rotary_emb.inv_freq", "steps", "mask"):
            assert torch.equal(found[name], tensors[name])
            assert found[name].dtype == tensors[name].dtype
        assert found["empty"].shape == (2, 0)
        assert found["scalar"].shape == ()
        assert report.names == "stored"
        assert "no name table for model_type 'odd'; names and layout are kept as stored" in (
            report.notices
        )
        assert "'big': 1 finite values overflow F16" in report.notices

    def test_without_a_config(self, tmp_path):
        save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
        streamload.convert(tmp_path / "x.safetensors", tmp_path / "out", dtype="bfloat16")
        assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors"]


def llama(folder, changes=(), config=None, drop=()):
    """A tiny LLaMA in ``folder``, with other tensors beside or instead of its own."""
    made = synthesize("llama-tiny", folder).path
    tensors = {n: t for n, t in load_file(f"{made}/model.safetensors").items() if n not in drop}
    save_file({**tensors, **dict(changes)}, f"{made}/model.safetensors")
    with open(f"{made}/config.json", encoding="utf-8") as file:
        changed = json.load(file) | (config or {})
    (folder / "config.json").write_text(json.dumps(changed))
    return made


HEAD = "lm_head.weight"
SCORE = {"score.weight": torch.ones(1, 64, dtype=torch.bfloat16)}
VALUES = {"v_head.summary.weight": torch.ones(1, 64), "v_head.summary.bias": torch.zeros(1)}


class TestBeyondTheTable:
    @pytest.mark.parametrize(
        ("changes", "drop", "says"),
        [
            (VALUES, (), r"2 names are not in the table of llama \('v_head"),
            (SCORE, (HEAD,), r"1 name is not in the table of llama \('score.weight'\)"),
            ({}, (HEAD,), "there is no 'lm_head.weight'"),
            ({"model.layers.2.extra": torch.ones(2)}, (), "1 name is not in the table"),
        ],
        ids=["value head", "classifier", "no head", "another layer"],
    )
    def test_a_cast_keeps_all_names(self, tmp_path, changes, drop, says):
        source = llama(tmp_path / "m", changes, drop=drop)
        report = streamload.convert(source, tmp_path / "out", dtype="float32")
        before, after = stored(source), load_file(tmp_path / "out" / "model.safetensors")
        assert set(before) == set(after)
        assert all(torch.equal(before[name].float(), after[name]) for name in after)
        assert report.names == "stored"
        (notice,) = (n for n in report.notices if "kept as stored" in n)
        assert re.search(says, notice)

    @pytest.mark.parametrize("prefix", ["pretrained_model.", "transformer.", "base."])
    def test_wrapped_by_another_model(self, tmp_path, prefix):
        source = llama(tmp_path / "m")
        tensors = load_file(f"{source}/model.safetensors")
        wrapped = {f"{prefix}{name}": tensor for name, tensor in tensors.items()} | VALUES
        save_file(wrapped, f"{source}/model.safetensors")
        streamload.convert(source, tmp_path / "out", dtype="float16")
        assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(wrapped)

    def test_without_a_head_to_local_names_and_back(self, tmp_path):
        source = llama(tmp_path / "m", drop=(HEAD,))
        streamload.convert(source, tmp_path / "local", names="local")
        streamload.convert(tmp_path / "local", tmp_path / "back")
        found = stored(tmp_path / "local")
        assert "lm_head.weight" not in found
        assert "tok_embed.weight" in found

    def test_unknown_names_have_no_local_ones(self, tmp_path):
        source = llama(tmp_path / "m", VALUES)
        with pytest.raises(PlanError, match="v_head"):
            streamload.convert(source, tmp_path / "out", names="local")

    def test_more_than_the_head_is_missing(self, tmp_path):
        source = llama(tmp_path / "m", VALUES, drop=("model.norm.weight",))
        with pytest.raises(PlanError, match="final_ln"):
            streamload.convert(source, tmp_path / "out", dtype="float32")

    @pytest.mark.parametrize(
        "config", [{"quantization_config": {"quant_method": "gptq"}}, {}], ids=["config", "scales"]
    )
    def test_quantised_numbers_are_copied_and_never_cast(self, tmp_path, config):
        name = "model.layers.0.mlp.up_proj.weight"
        small = torch.ones(160, 64).to(torch.float8_e4m3fn)
        changes = {name: small, f"{name}_scale_inv": torch.ones(2, 1)}
        source = llama(tmp_path / "m", changes, config)
        with pytest.raises(PlanError, match=r"(is|are) quantised"):
            streamload.convert(source, tmp_path / "out", dtype="float32")
        assert not (tmp_path / "out").exists()
        streamload.convert(source, tmp_path / "out")
        with pytest.warns(UserWarning, match="quantised|not applied"):
            found = stored(tmp_path / "out")
        assert found[name].dtype == torch.float8_e4m3fn


class TestCompanions:
    NAMES = (
        *("generation_config.json", "preprocessor_config.json", "processor_config.json"),
        *("video_preprocessor_config.json", "chat_template.jinja", "tekken.json"),
        *("tokenizer.model", "tokenizer.model.v3", "vocab.json", "qwen.tiktoken"),
        *("additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja"),
    )
    LEFT = ("README.md", "modeling_custom.py", "1_Pooling/config.json", "pytorch_model.bin")

    def folder(self, path):
        source = llama(path)
        for name in (*self.NAMES, *self.LEFT, ".gitattributes"):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(f"content of {name}")
        return source

    @pytest.mark.parametrize("names", ["published", "local"])
    def test_they_come_along_and_the_rest_is_listed(self, tmp_path, names):
        source = self.folder(tmp_path / "m")
        report = streamload.convert(source, tmp_path / "out", names=names)
        for name in self.NAMES:
            assert (tmp_path / "out" / name).read_text() == f"content of {name}"
        notice = "not copied: 1_Pooling/, README.md, modeling_custom.py, pytorch_model.bin"
        assert notice in report.notices

    def test_onto_itself_and_into_itself(self, tmp_path):
        source = self.folder(tmp_path / "m")
        inside = streamload.convert(source, tmp_path / "m" / "new" / "out")
        assert not any("new" in n for n in inside.notices)
        report = streamload.convert(source, source, dtype="float32")
        assert not any("not copied" in n for n in report.notices)
        assert (tmp_path / "m" / "README.md").exists()


class TestLocalNames:
    @pytest.mark.parametrize("bound", [None, 50_000])
    def test_no_other_library_takes_the_folder_for_its_own(self, gpt2, tmp_path, bound):
        out = tmp_path / "out"
        report = streamload.convert(gpt2, out, names="local", max_shard_bytes=bound)
        assert all(name.startswith("local") for name in report.files)
        assert any("only streamload reads them" in n for n in report.notices)
        for cls in (transformers.AutoModelForCausalLM, transformers.GPT2LMHeadModel):
            with pytest.raises(OSError, match=r"no file named model\.safetensors"):
                cls.from_pretrained(out)
        assert streamload.load(out).report.ok

    def test_older_folders_open(self, gpt2, tmp_path):
        streamload.convert(gpt2, tmp_path / "out", names="local")
        old = tmp_path / "out" / "local.safetensors"
        old.rename(tmp_path / "out" / "model.safetensors")
        assert streamload.load(tmp_path / "out").report.ok

    @pytest.mark.parametrize("bounds", [(None, None), (50_000, None), (None, 50_000)])
    @pytest.mark.parametrize("order", [("local", "published"), ("published", "local")])
    def test_one_set_replaces_the_other(self, gpt2, tmp_path, order, bounds):
        for names, bound in zip(order, bounds, strict=True):
            report = streamload.convert(gpt2, tmp_path, names=names, max_shard_bytes=bound)
        weights = {n for n in os.listdir(tmp_path) if ".safetensors" in n}
        index = {n for n in weights if n.endswith(".index.json")}
        assert weights - index == set(report.files)
        assert len(index) == (bounds[1] is not None)
        assert streamload.load(tmp_path).report.ok


class TestRefused:
    def test_missing_and_unexpected(self, gpt2, tmp_path):
        tensors = load_file(f"{gpt2}/model.safetensors")
        tensors["h.1.attn.c_attn.wieght"] = tensors.pop("h.1.attn.c_attn.weight")
        with open(f"{gpt2}/config.json", encoding="utf-8") as file:
            source = write(tmp_path / "typo", tensors, json.load(file))
        for names in ("published", "local"):
            with pytest.raises(PlanError, match=r"wieght"):
                streamload.convert(source, tmp_path / "out", names=names)
        assert not (tmp_path / "out").exists()

    def test_missing_from_local_names(self, gpt2, tmp_path):
        streamload.convert(gpt2, tmp_path / "local", names="local")
        tensors = load_file(tmp_path / "local" / "local.safetensors")
        del tensors["blocks.1.mlp.fc1.bias"]
        save_file(tensors, tmp_path / "local" / "local.safetensors")
        for names in ("published", "local"):
            with pytest.raises(PlanError, match=r"blocks\.1\.mlp\.fc1\.bias"):
                streamload.convert(tmp_path / "local", tmp_path / "out", names=names)

    def test_names(self, gpt2, tmp_path):
        with pytest.raises(ValueError, match="'published' or 'local'"):
            streamload.convert(gpt2, tmp_path / "out", names="other")

    def test_a_folder_whose_index_would_hide_the_result(self, gpt2, tmp_path):
        (tmp_path / "other.safetensors.index.json").write_text("{}")
        with pytest.raises(WriteError, match=r"other\.safetensors\.index\.json"):
            streamload.convert(gpt2, tmp_path)

    @pytest.mark.parametrize(
        ("name", "dtype", "says"),
        [
            ("w", torch.complex128, "complex128"),
            ("__metadata__", torch.float32, "header"),
            ("a\ud800", torch.float32, "Unicode"),
        ],
    )
    def test_what_safetensors_cannot_hold(self, tmp_path, name, dtype, says):
        torch.save({name: torch.ones(2, dtype=dtype), "v": torch.ones(1)}, tmp_path / "x.bin")
        shown = repr(name)[1:-1]
        for out in ("out", "out.safetensors"):
            with pytest.raises(PlanError, match="cannot be written") as info:
                streamload.convert(tmp_path / "x.bin", tmp_path / out)
            assert f"{shown}' cannot be written" in str(info.value)
            assert says in str(info.value)
        assert os.listdir(tmp_path) == ["x.bin"]
        assert torch.equal(stored(tmp_path / "x.bin")[name], torch.ones(2, dtype=dtype))

    def test_a_path_that_no_system_takes(self, gpt2, tmp_path):
        for name in ("a\0b", "a\0b.safetensors"):
            with pytest.raises(WriteError, match=r"a\\x00b"):
                streamload.convert(gpt2, os.path.join(tmp_path, name))


class TestOntoItself:
    def test_folder(self, gpt2, tmp_path):
        streamload.convert(gpt2, tmp_path / "here", max_shard_bytes=100_000)
        before = stored(tmp_path / "here")
        for options in ({"max_shard_bytes": 60_000}, {}, {"dtype": "bfloat16"}):
            streamload.convert(tmp_path / "here", tmp_path / "here", **options)
        files = sorted(os.listdir(tmp_path / "here"))
        assert [f for f in files if "safetensors" in f] == ["model.safetensors"]
        after = stored(tmp_path / "here")
        assert all(torch.equal(before[n].bfloat16(), t) for n, t in after.items())
        assert len(after) == len(before)

    def test_file(self, tmp_path):
        path = tmp_path / "x.safetensors"
        values = torch.randn(100, 30)
        save_file({"x": values}, path)
        streamload.convert(path, path, dtype="float16")
        assert torch.equal(load_file(path)["x"], values.half())


@pytest.mark.parametrize(
    "name", ["llama-tiny", "mistral-tiny", "qwen2-tiny", "qwen3-tiny", "neox-tiny"]
)
def test_every_family_there_and_back(tmp_path, name):
    source = synthesize(name, tmp_path / "source").path
    streamload.convert(source, tmp_path / "local", names="local", dtype="bfloat16")
    mapped = streamload.load(tmp_path / "local", mode="map")
    assert mapped.report.bytes_read == 0
    streamed = streamload.load(source, dtype="bfloat16")
    assert torch.equal(mapped.model(IDS), streamed.model(IDS))
    streamload.convert(tmp_path / "local", tmp_path / "back", max_shard_bytes=100_000)
    streamload.convert(source, tmp_path / "half", dtype="bfloat16")
    back, half = stored(tmp_path / "back"), stored(tmp_path / "half")
    # On the way back a tied head has both of its names again.
    tied = stored(source).keys() & {"lm_head.weight"}
    assert back.keys() == half.keys() | tied
    assert all(torch.equal(back[n], half[n]) for n in half)


def test_raw_partitions_as_transformers_loads_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    source = synthesize_neox_raw(tmp_path / "raw", layers=2, hidden=64, vocab_size=256).path
    streamload.convert(source, tmp_path / "out", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = streamload.load(source, dtype="float32").model
    assert (theirs(IDS).logits - ours(IDS)).abs().max() < 1e-5


def test_raw_partitions(tmp_path):
    source = synthesize_neox_raw(tmp_path / "raw", layers=2, hidden=64, vocab_size=256).path
    report = streamload.convert(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert report.names == "published"
    assert config["model_type"] == "gpt_neox"
    found = stored(tmp_path / "out")
    parts = stored(source)
    key = "attention.dense.weight"
    merged = torch.cat([parts[f"layer_3.model_{r}.{key}"] for r in (0, 1)], dim=1)
    assert torch.equal(found[f"gpt_neox.layers.1.{key}"], merged)
    key = "mlp.dense_4h_to_h.bias"
    summed = sum(parts[f"layer_2.model_{r}.{key}"].float() for r in (0, 1))
    assert torch.equal(found[f"gpt_neox.layers.0.{key}"], summed.half())
    assert torch.equal(
        found["embed_out.weight"],
        torch.cat([parts[f"layer_6.model_{r}.final_linear.weight"] for r in (0, 1)]),
    )


_MEASURE = """
import sys, streamload
streamload.convert(sys.argv[1], sys.argv[2], names=sys.argv[3], dtype="bfloat16")  # warm
report = streamload.convert(sys.argv[1], sys.argv[2], names=sys.argv[3], dtype="bfloat16")
print(report.memory.peak_rss_bytes)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """256 MiB of matrices, each above the staging; measured in a process of its own."""
    width = 4096
    block = {f"t{i}": torch.zeros(width, width) for i in range(4)}
    source = write(tmp_path / "big", block)
    command = [sys.executable, "-c", _MEASURE, str(source), str(tmp_path / "out"), "local"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert int(done.stdout) < 200 << 20
