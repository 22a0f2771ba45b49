"""Made-up checkpoints: layout as published, values by seed, whole or not at all."""

import json
import os
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from streamload.core.errors import WriteError
from streamload.synthesis import PRESETS, synthesize, writing
from streamload.synthesis.randoms import blocks, encode, values
from streamload.synthesis.recipes import Recipe

TINY = [name for name in PRESETS if name.endswith("-tiny")]


def shapes_of(name, **changes):
    preset = PRESETS[name]
    config = {**preset.config, **changes}
    return {r.name: r.shape for r in preset.recipes(config, True)}


def test_gpt2_file_has_published_names_in_order(tmp_path):
    report = synthesize("gpt2-tiny", tmp_path)
    with open(tmp_path / "model.safetensors", "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    assert size % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    names = list(header)
    assert names[:2] == ["wte.weight", "wpe.weight"]
    assert names[-2:] == ["ln_f.weight", "ln_f.bias"]
    assert names[2:16] == [
        "h.0.ln_1.weight", "h.0.ln_1.bias", "h.0.attn.bias",
        "h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias",
        "h.0.attn.c_proj.weight", "h.0.attn.c_proj.bias",
        "h.0.ln_2.weight", "h.0.ln_2.bias",
        "h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias",
        "h.0.mlp.c_proj.weight", "h.0.mlp.c_proj.bias",
        "h.1.ln_1.weight",
    ]  # fmt: skip
    assert header["h.0.attn.c_attn.weight"]["shape"] == [64, 192]
    assert report.tensors == len(names)
    assert report.to_dict()["files"] == ["model.safetensors", "config.json", "tokenizer.json"]


@pytest.mark.parametrize(("name", "nbytes"), [("gpt2", 548_090_880), ("gpt2-xl", 6_431_771_392)])
def test_gpt2_sizes_are_the_published_ones(name, nbytes):
    preset = PRESETS[name]
    total = sum(r.nbytes("float32") for r in preset.recipes(preset.config, True))
    assert total == nbytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920 + 151936 * 1024),  # the file repeats the tied head
        ("pythia-1b", 1_011_781_632),
    ],
)
def test_published_parameter_counts(name, parameters):
    preset = PRESETS[name]
    recipes = preset.recipes(preset.config, False)
    assert sum(r.nbytes("bfloat16") // 2 for r in recipes) == parameters


@pytest.mark.parametrize("name", [*TINY, "gpt2-stub"])
def test_transformers_finds_every_tensor(name, tmp_path):
    from transformers import AutoModelForCausalLM

    synthesize(name, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    info = loaded[1]
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(key.endswith(("attention.bias", "inv_freq")) for key in info["unexpected_keys"])


def test_values_depend_on_the_seed_and_on_nothing_else(tmp_path):
    synthesize("gpt2-tiny", tmp_path / "a", seed=3)
    synthesize("gpt2-tiny", tmp_path / "b", seed=3)
    synthesize("gpt2-tiny", tmp_path / "c", seed=4)
    synthesize("gpt2-tiny", tmp_path / "d", seed=3, layers=1, max_shard_bytes=50_000)
    a, b, c = (load_file(tmp_path / x / "model.safetensors") for x in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["wte.weight"], c["wte.weight"])
    index = json.loads((tmp_path / "d/model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "d" / file, "pt") as shard:
            assert torch.equal(shard.get_tensor(name), a[name])
    assert json.loads((tmp_path / "d/config.json").read_text())["n_layer"] == 1


def test_values_are_of_the_kind_asked_for():
    def drawn(recipe):
        return np.concatenate([b.copy() for b in values(recipe, seed=0, block_elements=1000)])

    normal = drawn(Recipe("w", (100, 90), value=0.5))
    assert normal.std() == pytest.approx(0.5, rel=0.05)
    whole = next(values(Recipe("w", (100, 90), value=0.5), seed=0))
    assert np.array_equal(normal, whole), "blocks must not change the values"
    assert drawn(Recipe("n", (5000,), "norm")).mean() == pytest.approx(1, abs=0.01)
    mask = drawn(Recipe("m", (1, 1, 50, 50), "causal_mask")).reshape(50, 50)
    assert np.array_equal(mask, np.tril(np.ones((50, 50))))
    assert drawn(Recipe("s", (), "constant", -1e9)).tolist() == [-1e9]
    assert drawn(Recipe("f", (4,), "inv_freq", 10000.0)) == pytest.approx([1, 0.1, 0.01, 0.001])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_torchs(dtype):
    block = next(values(Recipe("w", (4096,), value=3.0), seed=1)).copy()
    expected = torch.from_numpy(block).to(getattr(torch, dtype)).view(torch.int16)
    assert np.array_equal(encode(block, dtype).view(np.int16), expected.numpy())


def test_blocks_stay_small():
    recipe = Recipe("w", (3000, 1000))
    sizes = [block.nbytes for block in blocks(recipe, seed=0, dtype="float32")]
    assert sum(sizes) == 12_000_000
    assert max(sizes) <= 4 << 20


def test_qwen3_repeats_the_tied_head(tmp_path):
    synthesize("qwen3-tiny", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_masks_and_dtype_on_request(tmp_path):
    synthesize("gpt2-tiny", tmp_path, masks=False, dtype="bf16", tokenizer=False)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "h.0.attn.bias" not in tensors
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert not (tmp_path / "tokenizer.json").exists()


def test_same_checkpoint_is_reused_and_another_refused(tmp_path):
    first = synthesize("gpt2-tiny", tmp_path)
    before = os.stat(tmp_path / "model.safetensors").st_mtime_ns
    assert not first.reused
    assert synthesize("gpt2-tiny", tmp_path).reused
    with pytest.raises(WriteError, match="another checkpoint is there"):
        synthesize("gpt2-tiny", tmp_path, seed=1)
    assert os.stat(tmp_path / "model.safetensors").st_mtime_ns == before
    synthesize("gpt2-tiny", tmp_path, seed=1, force=True, max_shard_bytes=100_000)
    assert not (tmp_path / "model.safetensors").exists(), "the old file would win over the index"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_writing_leaves_nothing(tmp_path, error):
    def stop(done_bytes, total_bytes, tensor):
        if tensor == "h.1.ln_1.weight":
            raise error

    with pytest.raises(error):
        synthesize("gpt2-tiny", tmp_path / "new/folder", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_overwriting_leaves_the_old(tmp_path):
    synthesize("gpt2-tiny", tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize("gpt2-tiny", tmp_path, seed=1, force=True, progress=stop)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


def test_too_little_space_is_found_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 1000}))
    with pytest.raises(WriteError, match=r"needs 0\.02 GiB, 0\.00 GiB free"):
        synthesize("gpt2-tiny", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_progress_ends_at_the_total(tmp_path):
    seen = []
    synthesize("gpt2-tiny", tmp_path, progress=lambda *step: seen.append(step))
    assert seen[-1][0] == seen[-1][1] == os.path.getsize(tmp_path / "model.safetensors")
    assert seen[-1][2] == "ln_f.bias"


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown checkpoint 'gpt3'"):
        synthesize("gpt3", tmp_path)
    with pytest.raises(ValueError, match="cannot write int8"):
        synthesize("gpt2-tiny", tmp_path, dtype="int8")
    with pytest.raises(ValueError, match="at least one block"):
        synthesize("gpt2-tiny", tmp_path, layers=0)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="file"):
        synthesize("gpt2-tiny", tmp_path / "file" / "x")


@pytest.mark.parametrize("vocab", [256, 1000])
def test_tokenizer_round_trips_any_text(vocab):
    from tokenizers import Tokenizer

    from streamload.synthesis.made_up_tokenizer import byte_alphabet, tokenizer_json

    tokenizer = Tokenizer.from_str(tokenizer_json(vocab, end_token=vocab - 1))
    text = "Hello, wörld! 重み 🙂\n\tend"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("!").ids == [0], "byte tokens have GPT-2's numbers"
    assert {byte for byte, _ in byte_alphabet()} == set(range(256))
    if vocab == 1000:
        assert tokenizer.get_vocab_size() == 1000
        assert tokenizer.token_to_id("<|endoftext|>") == 999
        assert tokenizer.decode([300, 998]).isascii()


def test_is_there_looks_into_the_data(tmp_path):
    synthesize("gpt2-tiny", tmp_path)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert writing._other_weights(str(tmp_path)) == ["model.safetensors"]
    with pytest.raises(WriteError):
        synthesize("gpt2-tiny", tmp_path)
