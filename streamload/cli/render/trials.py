"""What the demonstration tries out: random against loaded weights, ties, a wrong shape."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import Any

import torch

from streamload.core.errors import MissingExtraError, StreamloadError

__all__ = ["check_ties", "continuations", "fingerprint", "write_misshapen"]


def continuations(folder: str, loaded: Any, prompt: str, count: int) -> tuple[str, str]:
    """What the model says with random weights, and with the loaded ones; greedy.

    Without the package ``tokenizers`` the texts are token ids.
    """
    import streamload
    from streamload.generation.tokenizer import load_tokenizer
    from streamload.mapping.registry import build_model

    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = build_model(config["model_type"], config).eval()
    try:
        tokenizer = load_tokenizer(folder)
    except MissingExtraError:
        tokenizer = None
    ids = list(prompt.encode()) if tokenizer is None else tokenizer.encode(prompt)
    texts = []
    for model in (fresh, loaded.model):
        tokens = list(streamload.generate(model, ids, max_new_tokens=count))
        texts.append(" ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens))
    return texts[0], texts[1]


def check_ties(loaded: Any) -> tuple[str, ...]:
    """The names of the first tied group, after checking that they are one object.

    Raises:
        StreamloadError: they are not, or nothing is tied.
    """
    parameters = dict(loaded.model.named_parameters(remove_duplicate=False))
    for group in loaded.report.tied:
        if len({id(parameters[name]) for name in group}) == 1:
            return tuple(group)
        raise StreamloadError(f"{' and '.join(group)} should be one tensor, and are not")
    raise StreamloadError("the model's tied weights are not in the report")


def fingerprint(model: torch.nn.Module) -> str:
    """A digest of all values, to see whether anything was changed."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_misshapen(folder: str, target: str, name: str) -> None:
    """Copy the checkpoint of ``folder`` with the last column of one weight cut off."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(os.path.join(folder, "model.safetensors"))
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, os.path.join(target, "model.safetensors"), metadata={"format": "pt"})
    shutil.copy(os.path.join(folder, "config.json"), target)
