"""GGUF files of every family and type: the weights, logits and texts of the published ones."""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf.constants import GGMLQuantizationType
from safetensors import safe_open
from safetensors.torch import save_file

import streamload
from streamload.cli.group import main as cli
from tests.sources.gguf.test_gguf_tokenizer import BYTE_LEVEL, CONTROL, NORMAL, parts_of, trained
from tests.support.gguf_files import (
    DRAWN,
    MADE_BY_LIBRARY,
    PLAIN,
    decoded,
    raw_blocks,
    write_gguf,
)

WIDTH = 256
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": WIDTH,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**_LLAMA, "model_type": "qwen2"},
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 32},
    "tied": {**_LLAMA, "tie_word_embeddings": True},
    "biased": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_positions": 64,
        "n_embd": WIDTH,
        "n_head": 4,
        "n_layer": 2,
    },
}
IDS = torch.tensor([[5, 1, 90, 33, 7, 7, 64]])


def theirs(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    own = AutoConfig.for_model(**config, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(own).eval()


def published(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a published checkpoint: the library's names, ties once."""
    model = theirs(config)
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not model.config.tie_word_embeddings
    }


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    """A configuration, the published tensors, and a GGUF file of them in float32."""
    config = FAMILIES[request.param]
    tensors = published(config)
    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    write_gguf(path, tensors, config)
    return config, tensors, os.fspath(path)


def logits_of(config: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: Any) -> torch.Tensor:
    """The logits of our own model with the same weights, by way of safetensors."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, os.path.join(folder, "model.safetensors"))
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)
        with torch.no_grad():
            return streamload.load(folder, dtype=dtype, mode="stream").model(IDS)


def test_logits_are_those_of_safetensors(family):
    config, tensors, path = family
    with torch.no_grad():
        found = streamload.load(path, mode="stream").model(IDS)
        mapped = streamload.load(path).model(IDS)
        expected = theirs(config)(IDS).logits
    assert torch.equal(found, mapped)
    assert torch.equal(found, logits_of(config, tensors, None))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_values_in_published_names(family):
    _, tensors, path = family
    names = {name: name for name in tensors}
    found = streamload.load_state_dict(path, mapping=names)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    with streamload.open_checkpoint(path) as source:
        assert all(torch.equal(source.tensor(name), tensors[name]) for name in tensors)


def test_into_and_as_classes_of_transformers(family):
    config, tensors, path = family
    with streamload.empty_weights():
        module = theirs(config)
    streamload.load_into(module, path)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, tensors.get(name, tensor)), name
    with torch.no_grad():
        expected = theirs(config)(IDS).logits
        assert torch.equal(module(IDS).logits, expected)
        loaded = streamload.load_transformers(path)
        torch.testing.assert_close(loaded.model(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert loaded.report.to_dict()["missing"] == []


def test_a_converted_folder_is_a_published_checkpoint(family, tmp_path):
    from transformers import AutoModelForCausalLM

    config, tensors, path = family
    report = streamload.convert(path, tmp_path / "out")
    assert report.names == "published"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors.get(name, tensor)), name
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, theirs(config)(IDS).logits)
    local = streamload.convert(path, tmp_path / "local", names="local")
    assert local.names == "local"
    mapped = streamload.load(tmp_path / "local", mode="map")
    with torch.no_grad():
        assert torch.equal(mapped.model(IDS), streamload.load(path).model(IDS))


@pytest.mark.parametrize("kind", [*PLAIN, *MADE_BY_LIBRARY, *DRAWN])
@pytest.mark.filterwarnings("ignore:.*decoded to float32")
def test_every_type_has_the_library_s_values(tmp_path, kind):
    config = FAMILIES["llama"]
    expected = write_gguf(tmp_path / "x.gguf", published(config), config, kind)
    names = {name: name for name in expected}
    found = streamload.load_state_dict(tmp_path / "x.gguf", mapping=names, chunk_bytes=70_000)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values), name
    for dtype in ("bfloat16", "float16"):
        cast = streamload.load_state_dict(tmp_path / "x.gguf", mapping=names, dtype=dtype)
        assert all(torch.equal(cast[n], v.to(cast[n].dtype)) for n, v in expected.items())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "Q2_K", "F16"])
@pytest.mark.parametrize("which", ["llama", "qwen2", "gpt2"])
def test_a_quantised_model_computes_as_its_values_do(tmp_path, which, kind):
    config = FAMILIES[which]
    expected = write_gguf(tmp_path / "x.gguf", published(config), config, kind)
    loaded = streamload.load(tmp_path / "x.gguf")
    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    assert {p.dtype for p in loaded.model.parameters()} == {dtype}
    own = {name: values.to(dtype) for name, values in expected.items()}
    with torch.no_grad():
        assert torch.equal(loaded.model(IDS), logits_of(config, own, None))
    assert {t.stored_dtype for t in loaded.report.loaded} == {
        kind if kind != "F16" else "float16",
        "float32",
    }


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_K", "Q3_K"])
def test_as_transformers_reads_it(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    config = FAMILIES["llama"]
    write_gguf(tmp_path / "x.gguf", published(config), config, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="x.gguf", dtype=torch.float32
        ).eval()
    loaded = streamload.load_transformers(tmp_path / "x.gguf", dtype="float32")
    for name, tensor in other.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    with torch.no_grad():
        assert torch.equal(loaded.model(IDS).logits, other(IDS).logits)


def test_convert_says_what_becomes_of_blocks(tmp_path):
    config = FAMILIES["llama"]
    expected = write_gguf(tmp_path / "x.gguf", published(config), config, "Q4_K")
    report = streamload.convert(tmp_path / "x.gguf", tmp_path / "exact")
    assert any("from Q4_K to float32" in notice for notice in report.notices)
    with safe_open(tmp_path / "exact" / "model.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), expected[name]) for name in file.keys())  # noqa: SIM118
    streamload.convert(tmp_path / "x.gguf", tmp_path / "half.safetensors", dtype="float16")
    with safe_open(tmp_path / "half.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert torch.equal(file.get_tensor(name), expected[name].half())
    with pytest.warns(UserWarning, match=r"16 tensors of Q4_K, decoded to float32"):
        found = streamload.load_state_dict(tmp_path / "x.gguf")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def with_tokenizer(writer: Any) -> None:
    tokens, merges = parts_of(trained(BYTE_LEVEL["llama-bpe"]()))
    end = tokens.index("<|end|>")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token == "<|end|>" else NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory) -> tuple[str, str]:
    """A quantised file with a tokenizer, and the folder it converts to."""
    folder = tmp_path_factory.mktemp("speaking")
    config = {**FAMILIES["llama"], "vocab_size": 420}
    write_gguf(folder / "x.gguf", published(config), config, "Q8_0", extra=with_tokenizer)
    streamload.convert(folder / "x.gguf", folder / "out", dtype="bfloat16")
    return os.fspath(folder / "x.gguf"), os.fspath(folder / "out")


def answer(path: str, *options: str) -> dict[str, Any]:
    command = ["generate", path, "--prompt", "one two three", "--max-new-tokens", "8", "--json"]
    done = CliRunner().invoke(cli, [*command, *options])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_text_in_and_text_out(speaking):
    path, folder = speaking
    found, expected = answer(path), answer(folder)
    assert found["tokens"] == expected["tokens"]
    assert found["text"] == expected["text"] != ""
    assert answer(path, "--transformers")["tokens"]


def test_the_folder_is_whole(speaking):
    from transformers import AutoTokenizer, GenerationConfig

    path, folder = speaking
    assert set(os.listdir(folder)) >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    other = AutoTokenizer.from_pretrained(os.path.dirname(path), gguf_file="x.gguf")
    text = "one two three, it's 4567 lazy dogs"
    assert tokenizer(text)["input_ids"][1:] == other(text)["input_ids"]
    assert tokenizer(text)["input_ids"][0] == tokenizer.bos_token_id
    settings = GenerationConfig.from_pretrained(folder)
    assert settings.eos_token_id == tokenizer.eos_token_id


def test_other_types_are_refused_by_name(tmp_path):
    config = FAMILIES["llama"]
    tensors = published(config)

    def other(writer: Any) -> None:
        data = np.zeros((256, 66), dtype=np.uint8)
        writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=GGMLQuantizationType.IQ2_XXS)

    kept = {n: t for n, t in tensors.items() if n != "model.layers.0.self_attn.q_proj.weight"}
    write_gguf(tmp_path / "x.gguf", kept, config, extra=other)
    with pytest.raises(streamload.PlanError, match=r"1 tensor of GGUF's type IQ2_XXS.*attn_q"):
        streamload.load(tmp_path / "x.gguf")
    listing = CliRunner().invoke(cli, ["inspect", os.fspath(tmp_path / "x.gguf")])
    assert listing.exit_code == 0
    assert "not to be loaded: 1 tensor of GGUF's type IQ2_XXS" in listing.output
    refused = CliRunner().invoke(cli, ["plan", os.fspath(tmp_path / "x.gguf")])
    assert refused.exit_code == 1
    assert "IQ2_XXS" in refused.output


@pytest.mark.parametrize("kind", [*MADE_BY_LIBRARY, *DRAWN])
def test_any_bytes_decode_as_the_library_decodes_them(kind):
    """Not numbers and infinite scales included, and runs cut at any block."""
    from streamload.decoding.blocks import Blocks
    from streamload.decoding.values.blocks import decode
    from streamload.sources.gguf.block_types import block_type

    found = block_type(int(GGMLQuantizationType[kind]))
    data = np.random.default_rng(7).integers(0, 256, (37, found.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = decoded(data, kind).flatten()
    encoding = Blocks((), kind, type=kind, elements=found.elements, nbytes=found.nbytes)
    flat = torch.from_numpy(data).flatten()

    class Parts:
        def read(self, _part: int, start: int, stop: int) -> torch.Tensor:
            return flat[start:stop]

    for first, last in ((0, 37), (5, 6), (9, 30)):
        start, stop = first * found.elements, last * found.elements
        out = torch.full((stop - start,), -7.0)
        decode(encoding, Parts(), start, stop, out)
        assert torch.equal(out.isnan(), expected[start:stop].isnan())
        assert torch.equal(out.nan_to_num(0.5), expected[start:stop].nan_to_num(0.5))
    assert raw_blocks("Q4_K", (1, 256), 0).shape == (1, 144)
