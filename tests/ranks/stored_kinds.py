"""One tiny LLaMA as other tools store it: quantised, in pieces, with an adapter beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.support.gguf_files import write_gguf

_BLOCK = 24  # divides no size evenly


def stored_kinds(llama: Path, folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Paths and options of loads, by kind.

    Args:
        llama: a published checkpoint.
        folder: where the others are written.
    """
    folder.mkdir()
    tensors = load_file(llama / "model.safetensors")
    config = json.loads((llama / "config.json").read_text())
    write_gguf(folder / "q8.gguf", {n: t.float() for n, t in tensors.items()}, config, "Q8_0")
    pieces = folder / "pieces"
    dcp.save(dict(tensors), checkpoint_id=pieces, no_dist=True)
    (pieces / "config.json").write_text(json.dumps(config))
    _fp8(tensors, config, folder / "fp8")
    _adapter(tensors, folder / "adapter")
    return {
        "gguf": (folder / "q8.gguf", {"dtype": "float32"}),
        "pieces": (pieces, {}),
        "fp8": (folder / "fp8", {"dtype": "bfloat16"}),
        "adapter": (llama, {"adapter": folder / "adapter"}),
        "mapped": (llama, {"mode": "map"}),
        "auto": (llama, {"mode": "auto"}),
    }


def _fp8(tensors: Mapping[str, torch.Tensor], config: dict[str, Any], to: Path) -> None:
    found: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        found[name] = values
        if name.endswith("proj.weight"):
            rows, columns = (-(-size // _BLOCK) for size in values.shape)
            found[name] = values.float().to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = torch.rand(rows, columns) + 0.5
    method = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
    to.mkdir()
    save_file(found, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps({**config, "quantization_config": method}))


def _adapter(tensors: Mapping[str, torch.Tensor], to: Path) -> None:
    layers = ("q_proj", "o_proj", "down_proj")
    found: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        layer = name.removesuffix(".weight")
        if layer.endswith(layers):
            found[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(3, values.shape[1])
            found[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(values.shape[0], 3)
    told = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": list(layers)}
    to.mkdir()
    save_file(found, to / "adapter_model.safetensors")
    (to / "adapter_config.json").write_text(json.dumps(told))
