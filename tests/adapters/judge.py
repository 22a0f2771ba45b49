"""Tiny bases and adapters made by PEFT, and what PEFT's own merge makes of the two."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn

SIZES = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    **SIZES,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 12}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (
        transformers.GPT2Config,
        {"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 8, **SIZES},
    ),
    "llama": (transformers.LlamaConfig, LLAMA),
    "tied llama": (transformers.LlamaConfig, {**LLAMA, "tie_word_embeddings": True}),
    "mixtral": (transformers.MixtralConfig, {**LLAMA, **EXPERTS, "num_hidden_layers": 1}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, {**LLAMA, **EXPERTS, "num_hidden_layers": 1}),
}


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT warns of what it corrects itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def empty_base(kind: str) -> nn.Module:
    cls, options = CONFIGS[kind]
    return transformers.AutoModelForCausalLM.from_config(cls(**options))


def write_base(folder: Path, kind: str) -> Path:
    """A model with random weights, saved as the library does."""
    torch.manual_seed(1)
    with quiet():
        model = empty_base(kind)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape) / 4)
        model.save_pretrained(folder)
    return folder


def write_adapter(folder: Path, base: Path, seed: int = 2, **options: Any) -> Path:
    """An adapter whose every trained tensor differs from what it began as."""
    torch.manual_seed(seed)
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, **options}
        peft = get_peft_model(model, LoraConfig(**options))
        with torch.no_grad():
            for p in peft.parameters():
                if p.requires_grad:
                    p.add_(torch.randn(p.shape) / 8)
        peft.save_pretrained(folder)
    return folder


def merged(
    base: Path, *adapters: Path, dtype: torch.dtype = torch.float32
) -> Mapping[str, torch.Tensor]:
    """PEFT's merge of adapters, one after the other, all in ``dtype``."""
    with quiet():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        for adapter in adapters:
            model = PeftModel.from_pretrained(model, os.fspath(adapter)).merge_and_unload()
        return dict(model.state_dict())


def off(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """How far the values are from those wanted, at most."""
    assert found.keys() == wanted.keys()
    return max(float((found[n].double() - wanted[n].double()).abs().max()) for n in wanted)


def is_rounded(found: torch.Tensor, exact: torch.Tensor, error: float) -> bool:
    """True if each value is the exact one's nearest, or a neighbour's that is as near to within
    ``error``."""
    least, most = (exact - error).to(found.dtype), (exact + error).to(found.dtype)
    nearest = exact.to(found.dtype)
    is_doubtful = least != most
    rest = torch.equal(found[~is_doubtful], nearest[~is_doubtful])
    return rest and bool(((least <= found) & (found <= most)).all())


def hand_made(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    prefix: str = "base_model.model.",
    **config: Any,
) -> Path:
    """An adapter of these tensors, as PEFT names them, with ``r`` 2 and ``lora_alpha`` 4."""
    folder.mkdir(parents=True)
    save_file(
        {prefix + name: t for name, t in tensors.items()}, folder / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def pair(module: str, outputs: int, inputs: int, rank: int = 2) -> dict[str, torch.Tensor]:
    """The factors of one layer."""
    torch.manual_seed(len(module))
    return {
        f"{module}.lora_A.weight": torch.randn(rank, inputs),
        f"{module}.lora_B.weight": torch.randn(outputs, rank),
    }


def product(tensors: Mapping[str, torch.Tensor], module: str) -> torch.Tensor:
    """B A, [outputs, inputs], exactly."""
    a, b = (tensors[f"{module}.lora_{letter}.weight"].double() for letter in "AB")
    return b @ a
