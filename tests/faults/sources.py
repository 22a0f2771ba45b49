"""One small checkpoint in every form it can be read from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["KINDS", "TENSORS", "data_file"]

COUNT = 16
TENSORS = {f"t{i:02d}": torch.full((32, 64), float(i + 1)) for i in range(COUNT)}


def _safetensors(folder: str) -> str:
    path = os.path.join(folder, "model.safetensors")
    save_file(TENSORS, path)
    return path


def _sharded(folder: str) -> str:
    weight_map = {}
    for at in range(2):
        name = f"model-0000{at + 1}-of-00002.safetensors"
        part = {n: t for i, (n, t) in enumerate(TENSORS.items()) if i * 2 // COUNT == at}
        save_file(part, os.path.join(folder, name))
        weight_map |= dict.fromkeys(part, name)
    path = os.path.join(folder, "model.safetensors.index.json")
    with open(path, "w") as file:
        json.dump({"metadata": {}, "weight_map": weight_map}, file)
    return path


def _zip(folder: str) -> str:
    path = os.path.join(folder, "pytorch_model.bin")
    torch.save(TENSORS, path)
    return path


def _legacy(folder: str) -> str:
    path = os.path.join(folder, "model.pt")
    torch.save(TENSORS, path, _use_new_zipfile_serialization=False)
    return path


KINDS: dict[str, Callable[[str], str]] = {
    "safetensors": _safetensors,
    "sharded": _sharded,
    "torch zip": _zip,
    "torch legacy": _legacy,
}


def data_file(path: str) -> str:
    """The last file with tensor data of the checkpoint at ``path``."""
    if path.endswith(".index.json"):
        return os.path.join(os.path.dirname(path), "model-00002-of-00002.safetensors")
    return path


def same(found: Any) -> bool:
    """True if a mapping holds just the tensors' values."""
    return found.keys() == TENSORS.keys() and all(
        torch.equal(found[name].detach(), tensor) for name, tensor in TENSORS.items()
    )
