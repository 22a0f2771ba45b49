"""Metadata as a configuration: against the one it was written from, and transformers' reading."""

from __future__ import annotations

import os
import struct
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from streamload.core.errors import CheckpointError
from streamload.sources.files import OpenFile
from streamload.sources.gguf.config import config_of
from streamload.sources.gguf.header import read_header
from streamload.sources.gguf.metadata import Metadata
from streamload.sources.gguf.metadata_values import Value
from streamload.sources.gguf.rotary_factors import llama3_scaling
from tests.families.tiny import CONFIG
from tests.support.gguf_files import write_gguf
from tests.support.tiny import GPT2_CONFIG, gpt2_tensors, values

LLAMA: dict[str, Any] = {**CONFIG, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
EMBEDDING = {"model.embed_tokens.weight": values(1, 11, 16)}
HEAD = {"lm_head.weight": values(2, 11, 16)}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "llama": (LLAMA, EMBEDDING | HEAD),
    "tied": ({**LLAMA, "tie_word_embeddings": True}, EMBEDDING),
    "wide heads": ({**LLAMA, "head_dim": 8}, EMBEDDING | HEAD),
    "qwen2": ({**LLAMA, "model_type": "qwen2"}, EMBEDDING | HEAD),
    "qwen3": ({**LLAMA, "model_type": "qwen3", "head_dim": 32}, EMBEDDING | HEAD),
    "gpt2": ({**GPT2_CONFIG, "tie_word_embeddings": True}, gpt2_tensors()),
}


def config_in(path: Any) -> dict[str, Any]:
    with OpenFile(os.fspath(path)) as file:
        header = read_header(file)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    found = config_of(Metadata(os.fspath(path), header.metadata), shapes, None)
    assert found is not None
    return found


@pytest.mark.parametrize("which", CONFIGS)
def test_as_written_and_as_transformers_reads_it(tmp_path, which):
    from transformers import AutoConfig

    config, tensors = CONFIGS[which]
    tokens = gguf_tokens(config["vocab_size"])
    write_gguf(tmp_path / "x.gguf", tensors, config, extra=tokens)
    found = config_in(tmp_path / "x.gguf")
    assert {key: found[key] for key in config} == config
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="x.gguf").to_dict()
    ours = AutoConfig.for_model(**found).to_dict()
    # Left out: what transformers makes of the file's name, keys it takes for fields of GPT-2, and
    # float32 numbers, which it does not round to the decimals they were.
    for key in (
        "_name_or_path",
        "_model_name_or_path",
        "architectures",
        "n_ctx",
        "feed_forward_length",
        "n_positions",
    ):
        theirs.pop(key, None)
        ours.pop(key, None)
    for key in ("rms_norm_eps", "layer_norm_epsilon"):
        assert theirs.pop(key, 0) == pytest.approx(ours.pop(key, 0), rel=1e-6)
    if which == "qwen3":  # transformers does not read how wide a head is
        assert theirs.pop("head_dim") != ours.pop("head_dim") == 32
    assert ours == theirs


def gguf_tokens(count: int) -> Any:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{at}" for at in range(count)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    return add


def test_ends_of_a_text(tmp_path):
    def more(writer: gguf.GGUFWriter) -> None:
        gguf_tokens(11)(writer)
        writer.add_eot_token_id(7)

    write_gguf(tmp_path / "x.gguf", EMBEDDING, LLAMA, extra=more)
    found = config_in(tmp_path / "x.gguf")
    assert (found["bos_token_id"], found["eos_token_id"]) == (1, [2, 7])


def base(**changes: Any) -> dict[str, Value]:
    pairs: dict[str, Value] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 32,
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 24,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in changes.items():
        pairs[key.replace("__", ".")] = value
    return pairs


def made(pairs: dict[str, Value], factors: bytes | None = None) -> dict[str, Any]:
    found = config_of(Metadata("x.gguf", pairs), {"token_embd.weight": (11, 16)}, factors)
    assert found is not None
    return found


@pytest.mark.parametrize("count", [[4, 4], [4]])
def test_a_number_for_each_layer(count):
    assert made(base(llama__attention__head_count=count))["num_attention_heads"] == 4


SCALINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "none": ({"llama__rope__scaling__type": "none"}, None),
    "linear": (
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
        {"rope_type": "linear", "factor": 4.0}),
    "of old": ({"llama__rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "yarn": (
        {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0,
         "llama__rope__scaling__original_context_length": 8},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}),
}  # fmt: skip


@pytest.mark.parametrize("which", SCALINGS)
def test_scaling_by_keys(which):
    changes, expected = SCALINGS[which]
    assert made(base(**changes))["rope_scaling"] == expected


PUBLISHED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
ROTARY = {
    "3.1": (PUBLISHED, 500000.0, 128),
    "3.2": ({**PUBLISHED, "factor": 32.0}, 500000.0, 64),
    "another": ({**PUBLISHED, "high_freq_factor": 2.5, "factor": 4.0,
                 "original_max_position_embeddings": 2048}, 10000.0, 64),
}  # fmt: skip


@pytest.mark.parametrize("which", ROTARY)
def test_rotary_factors_give_the_scaling_they_were_made_of(which):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling, theta, size = ROTARY[which]

    def frequencies(fields: dict[str, Any]) -> torch.Tensor:
        parameters = {**fields, "rope_theta": theta}
        config = LlamaConfig(
            hidden_size=size, num_attention_heads=1, head_dim=size, rope_parameters=parameters
        )
        return ROPE_INIT_FUNCTIONS["llama3"](config, None)[0]

    plain = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    factors = (plain / frequencies(scaling)).numpy().astype(np.float32)
    found = llama3_scaling([float(one) for one in factors], theta)
    assert found is not None
    torch.testing.assert_close(frequencies(found), frequencies(scaling), rtol=1e-5, atol=0)
    if which != "another":
        assert found == scaling
    pairs = base(
        llama__rope__freq_base=theta, llama__attention__key_length=size,
    )  # fmt: skip
    assert made(pairs, factors.tobytes())["rope_scaling"] == found


def test_factors_of_one_are_none():
    assert llama3_scaling([1.0] * 16, 10000.0) is None


FAULTS: dict[str, tuple[dict[str, Value], bytes | None, str]] = {
    "no layers": ({k: v for k, v in base().items() if "block" not in k}, None, "llama.block_count"),
    "heads": (base(llama__attention__head_count="4"), None, "'4', expected a whole number"),
    "heads of layers": (base(llama__attention__head_count=[4, 2]), None, "one number for all"),
    "no heads": (base(llama__attention__head_count=0), None, "at least 1"),
    "experts": (base(llama__expert_count=8), None, "llama.expert_count"),
    "parts of heads": (
        base(llama__rope__dimension_count=2),
        None,
        "expected 4, the size of a head",
    ),
    "scaling": (base(llama__rope__scaling__type="longrope"), None, "none, linear or yarn"),
    "no factor": (base(llama__rope__scaling__type="yarn"), None, "llama.rope.scaling.factor"),
    "epsilon": (base(llama__attention__layer_norm_rms_epsilon=float("nan")), None, "a finite"),
    "epsilon of text": (base(llama__attention__layer_norm_rms_epsilon="x"), None, "a number"),
    "factors": (base(), struct.pack("<3f", 1, 1, 1), "has 3 factors, expected 2"),
    "factors of none": (base(), struct.pack("<2f", 3, 2), "not those of LLaMA 3's"),
    "factors of nothing": (base(), struct.pack("<2f", 0, float("nan")), "not finite positive"),
    "scaled twice": (base(llama__rope__scale_linear=2.0), struct.pack("<2f", 1, 1), "by its keys"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_by_name(fault):
    pairs, factors, said = FAULTS[fault]
    with pytest.raises(CheckpointError) as info:
        made(pairs, factors)
    assert said in str(info.value)
    assert info.value.path == "x.gguf"


def test_an_unknown_architecture_has_no_configuration():
    assert config_of(Metadata("x", {"general.architecture": "rwkv7"}), {}, None) is None
    assert config_of(Metadata("x", {}), {}, None) is None
