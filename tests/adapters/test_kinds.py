"""All kinds of LoRA that PEFT writes, against PEFT's own merge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import streamload
from tests.adapters.judge import is_rounded, merged, off, write_adapter, write_base

LINEAR = {
    "llama": ["q_proj", "v_proj", "o_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
EMBEDDING = {"llama": "embed_tokens", "gpt2": "wte"}
BOTH = ("llama", "gpt2")


def kinds() -> dict[str, tuple[str, dict]]:
    """Name → base, options of LoraConfig."""
    found: dict[str, tuple[str, dict]] = {}
    for base in BOTH:
        linear, embedding = LINEAR[base], EMBEDDING[base]
        first, last = linear[0], linear[-1]
        some = {
            "plain": {},
            "rslora": {"use_rslora": True},
            "patterns": {
                "rank_pattern": {first: 2, rf"1\..*\.{last}": 6},
                "alpha_pattern": {f".*2.*{last}": 3, last: 5},
            },
            "dora": {"use_dora": True},
            "embeddings": {"target_modules": [*linear, embedding]},
            "dora on embeddings": {"target_modules": [first, embedding], "use_dora": True},
            "modules to save": {"modules_to_save": ["ln_f", "norm", "wpe"]},
            "bias of all": {"bias": "all"},
            "bias of the adapted": {"bias": "lora_only"},
            "chosen layers": {"layers_to_transform": [0, 2]},
            "trained tokens": {"trainable_token_indices": [7, 3]},
        }
        for name, options in some.items():
            found[f"{base}: {name}"] = (base, {"target_modules": linear, **options})
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    both = {"target_modules": ["q_proj"], "target_parameters": experts}
    one = {**both, "target_parameters": experts[1:], "use_rslora": True}
    ranks = {**both, "rank_pattern": {"experts.gate_up_proj": 2}}
    found["mixtral: experts"] = ("mixtral", both)
    found["mixtral: one parameter"] = ("mixtral", one)
    found["qwen2_moe: patterns of parameters"] = ("qwen2_moe", ranks)
    head = {"target_modules": ["lm_head", "k_proj"], "modules_to_save": ["embed_tokens"]}
    found["llama: head"] = ("llama", head)
    found["gpt2: lora_bias"] = (
        "gpt2",
        {"target_modules": ["c_attn"], "lora_bias": True, "bias": "all"},
    )
    tied = {"target_modules": ["embed_tokens", "up_proj"]}
    found["tied llama: embeddings"] = ("tied llama", tied)
    return found


KINDS = kinds()


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {kind: write_base(folder / kind, kind) for kind in {base for base, _ in KINDS.values()}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind(kind, bases, tmp_path):
    base, options = bases[KINDS[kind][0]], KINDS[kind][1]
    adapter = write_adapter(tmp_path / "adapter", base, **options)
    plain = streamload.load_transformers(base).model.state_dict()
    wanted = merged(base, adapter)
    assert off(plain, wanted) > 0.01  # the adapter does something

    loaded = streamload.load_transformers(base, adapter=adapter)
    assert off(loaded.model.state_dict(), wanted) <= 2e-6
    assert any("merged" in notice for notice in loaded.report.notices)

    exact = merged(base, adapter, dtype=torch.float64)
    rounded = streamload.load_transformers(base, adapter=adapter, dtype="bfloat16")
    for name, found in rounded.model.state_dict().items():
        assert is_rounded(found, exact[name], 1e-6), name
